"""A reader of pickles that cannot run anything.

It is an interpreter of pickle's own instructions that has no way to import a name or to call one. Names are checked
against `allowed.py`; a call of a name is what `calls.py` makes of its arguments. Every number that the file states is
checked against the bytes that are there, and the values that are made are counted.
"""

import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn

from mizzen.checkpoint.foreign.pickle_calls import RENAMED, Unreadable, call, constant, is_allowed, is_key, numpy_array
from mizzen.checkpoint.foreign.values import DTYPES, HOLDERS, Inert, Name, TooDeep, written_out
from mizzen.checkpoint.tagged_json import EQUAL_HASHES, TooLarge, refuse_equal_hashes
from mizzen.errors import CheckpointError

VALUES: Final = 8_000_000
"""How many values one pickle may have; a model of 100,000 tensors on 8 ranks has about 6 million."""
INTEGER: Final = 64
"""How many bytes an integer may have."""
NAME: Final = 1000
"""How many characters the name of a class may have, and that of its module."""
SMALL: Final = 16
"""How many arguments a call has, and a tuple that is often shared: more of them are counted."""

Persistent = Callable[[object], object]


@dataclass(slots=True)
class Machine:
    """The state of one reading: the bytes, where it is, the stack and the memo."""

    data: bytes
    where: str
    packages: tuple[str, ...]
    persistent: Persistent | None
    at: int = 0
    stack: list[object] = field(default_factory=list)
    marks: list[list[object]] = field(default_factory=list)
    memo: dict[int, object] = field(default_factory=dict)
    values: int = 0
    is_shared: bool = False
    """Whether something that holds others is in it twice."""
    alike: dict[tuple[int, int], int] = field(default_factory=dict)
    """How many keys with one hash a dict or set has: by the number of its object and the hash."""

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > len(self.data) - self.at:
            raise Unreadable(f"{count} bytes are announced and {len(self.data) - self.at} are left")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        """The next number, little endian."""
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(value)

    def line(self) -> str:
        """The next line, without its end."""
        end = self.data.index(b"\n", self.at)
        return self.take(end - self.at + 1)[:-1].decode()

    def spend(self, count: int) -> None:
        """Count values that are made."""
        self.values += count
        if self.values > VALUES:
            raise Unreadable(f"there are more than {VALUES:,} values in it")

    def push(self, value: object) -> None:
        """Make a value the top of the stack."""
        self.values += 1
        if self.values > VALUES:
            self.spend(0)
        self.stack.append(value)

    def to_mark(self) -> list[object]:
        """What was pushed since the last mark."""
        found, self.stack = self.stack, self.marks.pop()
        return found

    def named(self, module: str, name: str) -> object:
        """A name that the pickle speaks of, if it may."""
        if len(module) > NAME or len(name) > NAME:
            raise Unreadable(f"a name of {len(module) + len(name)} characters")
        found = Name(RENAMED.get(module, module), name)
        if str(found) not in DTYPES and not is_allowed(found, self.packages):
            key = next((repr(value) for value in reversed(self.stack) if isinstance(value, str)), None)
            raise CheckpointError(
                f"{self.where}: refused {str(found)[:200]!r} at byte {self.at}{f', after {key[:80]}' if key else ''}: "
                f"only tensors and plain data are read, and nothing in a checkpoint is run{_way_out(found)}"
            )
        return constant(found)

    def use(self, value: object) -> None:
        """A value that is there already comes again."""
        is_small = isinstance(value, tuple) and len(value) <= SMALL and not any(isinstance(v, HOLDERS) for v in value)
        self.is_shared = self.is_shared or (isinstance(value, HOLDERS) and not is_small)
        self.stack.append(value)

    def check_key(self, target: object, key: object) -> None:
        """Refuse a key that takes long to find: texts have hashes that nobody can foresee, numbers have not."""
        if not is_key(key):
            raise Unreadable(f"a key that is a {type(key).__name__}")
        if isinstance(key, tuple | float) or (isinstance(key, int) and key.bit_length() > 60):
            place = (id(target), hash(key))
            self.alike[place] = count = self.alike.get(place, 0) + 1
            if count > EQUAL_HASHES:
                raise Unreadable(f"more than {EQUAL_HASHES} keys of one dict or set have the same hash")


def _way_out(name: Name) -> str:
    """A class of the user's own is harmless as a placeholder; what is Python's or torch's has no business here."""
    package = name.module.partition(".")[0][:80]
    if package in sys.stdlib_module_names or package in ("torch", "numpy"):
        return ""
    return f". If it is a class of yours, its objects can become placeholders: foreign.open(..., inert=({package!r},))"


def load(
    data: bytes, where: str, *, packages: tuple[str, ...] = (), persistent: Persistent | None = None, at: int = 0
) -> tuple[object, int]:
    """One pickle's value and where it ends. `persistent` says what a reference to something outside the pickle is."""
    machine = Machine(data, where, packages, persistent, at)
    try:
        while machine.at < len(data):
            code = data[machine.at]
            machine.at += 1
            if code == STOP:
                return _checked(machine), machine.at
            if (step := STEPS.get(code)) is None:
                raise Unreadable(f"the instruction {bytes((code,))!r} is not one that torch or this reader uses")
            step(machine)
        raise Unreadable("it has no end")
    except (Unreadable, TooLarge, TooDeep, IndexError, KeyError, ValueError, TypeError, struct.error) as error:
        raise CheckpointError(f"{where}: not a pickle that can be read, at byte {machine.at}: {error}") from error


def _checked(m: Machine) -> object:
    """The value of a pickle, if it is no larger for who walks through it than for who reads it."""
    found = m.stack.pop()
    if m.is_shared and (size := written_out(found)) > VALUES:
        words = f"{size:,}" if size < 10**12 else "endlessly many"
        raise Unreadable(f"its values are shared: written out there are {words}, and at most {VALUES:,} are read")
    return found


def _mark(m: Machine) -> None:
    m.marks.append(m.stack)
    m.stack = []
    m.spend(1)


def _pop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.to_mark()


def _global(m: Machine) -> None:
    module = m.line()
    m.push(m.named(module, m.line()))


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise Unreadable("a name that is not text")
    m.push(m.named(module, name))


def _reduce(m: Machine) -> None:
    args, name = m.stack.pop(), m.stack.pop()
    if not isinstance(name, Name) or not isinstance(args, tuple):
        raise Unreadable(f"a call of {type(name).__name__}")
    m.spend(len(args) // SMALL)
    m.push(call(name, args, m.spend))


def _new(m: Machine) -> None:
    args, name = m.stack.pop(), m.stack.pop()
    if not isinstance(name, Name) or not isinstance(args, tuple):
        raise Unreadable(f"an object of {type(name).__name__}")
    m.spend(len(args) // SMALL)
    m.push(call(name, args, m.spend))


def _new_with_keywords(m: Machine) -> None:
    keywords = m.stack.pop()
    _new(m)
    if isinstance(made := m.stack[-1], Inert):
        made.args = (*made.args, keywords)


def _build(m: Machine) -> None:
    """The state of a placeholder. What plain values carry beside their contents is left out."""
    state, target = m.stack.pop(), m.stack[-1]
    if isinstance(target, Inert):
        if target.name == "numpy.ndarray":
            target.state = numpy_array(state, m.spend)
        elif target.name != "numpy.dtype":
            target.state = state
    elif isinstance(target, Name):
        raise Unreadable(f"a state for {target}, which is no object")


def _put(m: Machine, index: int) -> None:
    m.memo[index] = m.stack[-1]
    m.spend(1)


def _get(m: Machine, index: int) -> None:
    if index not in m.memo:
        raise Unreadable(f"it refers to its value number {index}, which is not there")
    m.use(m.memo[index])


def _append(m: Machine, items: list[object]) -> None:
    target = m.stack[-1]
    if isinstance(target, Inert):
        target.items.extend(items)
    elif isinstance(target, list):
        target.extend(items)
    else:
        raise Unreadable(f"items of {type(target).__name__}")


def _append_one(m: Machine) -> None:
    item = m.stack.pop()
    _append(m, [item])


def _add(m: Machine) -> None:
    items, target = m.to_mark(), m.stack[-1]
    if not isinstance(target, set):
        raise Unreadable(f"items of {type(target).__name__}")
    for item in items:
        m.check_key(target, item)
    target.update(items)


def _set(m: Machine, items: list[object]) -> None:
    target = m.stack[-1]
    if isinstance(target, Inert):
        target.items.extend(items)
        return
    if not isinstance(target, dict) or len(items) % 2:
        raise Unreadable(f"keys and values of {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        m.check_key(target, key)
        target[key] = value


def _set_one(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _set(m, [key, value])


def _dict(m: Machine) -> None:
    items = m.to_mark()
    m.push({})
    _set(m, items)


def _frozenset(m: Machine) -> None:
    items = m.to_mark()
    if not all(map(is_key, items)):
        raise Unreadable("a set of something that is no number, string or name")
    refuse_equal_hashes(items)
    m.push(frozenset(items))


def _tuple(m: Machine, count: int) -> None:
    if len(m.stack) < count:
        raise Unreadable("a tuple without its items")
    m.stack[-count:] = [tuple(m.stack[-count:])]
    m.spend(1)


def _tuple_of_all(m: Machine) -> None:
    items = m.to_mark()
    m.push(tuple(items))


def _list_of_all(m: Machine) -> None:
    items = m.to_mark()
    m.push(items)


def _integer(m: Machine, count: int) -> None:
    if not 0 <= count <= INTEGER:
        raise Unreadable(f"an integer of {count} bytes")
    m.push(int.from_bytes(m.take(count), "little", signed=True))


def _outside(m: Machine) -> None:
    if m.persistent is None:
        raise Unreadable("a reference to something outside of it")
    m.push(m.persistent(m.stack.pop()))


def _refuse_extension(m: Machine) -> NoReturn:
    raise Unreadable("a name from the registry of this computer")


STOP: Final = ord(".")
STEPS: Final[dict[int, Callable[[Machine], object]]] = {
    ord(code): step
    for code, step in {
        "\x80": lambda m: m.take(1),  # PROTO
        "\x95": lambda m: m.take(8),  # FRAME
        "(": _mark,
        "0": _pop,
        "1": lambda m: m.to_mark(),
        "2": lambda m: m.use(m.stack[-1]),
        "N": lambda m: m.push(None),
        "\x88": lambda m: m.push(True),
        "\x89": lambda m: m.push(False),
        "J": lambda m: m.push(m.number("<i")),
        "K": lambda m: m.push(m.take(1)[0]),
        "M": lambda m: m.push(m.number("<H")),
        "\x8a": lambda m: _integer(m, m.take(1)[0]),
        "\x8b": lambda m: _integer(m, m.number("<i")),
        "G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
        "T": lambda m: m.push(m.take(m.number("<I")).decode("latin1")),
        "U": lambda m: m.push(m.take(m.take(1)[0]).decode("latin1")),
        "X": lambda m: m.push(m.take(m.number("<I")).decode("utf8", "surrogatepass")),
        "\x8c": lambda m: m.push(m.take(m.take(1)[0]).decode("utf8", "surrogatepass")),
        "\x8d": lambda m: m.push(m.take(m.number("<Q")).decode("utf8", "surrogatepass")),
        "B": lambda m: m.push(m.take(m.number("<I"))),
        "C": lambda m: m.push(m.take(m.take(1)[0])),
        "\x8e": lambda m: m.push(m.take(m.number("<Q"))),
        "\x96": lambda m: m.push(m.take(m.number("<Q"))),  # BYTEARRAY8, kept as bytes
        ")": lambda m: m.push(()),
        "]": lambda m: m.push([]),
        "}": lambda m: m.push({}),
        "\x8f": lambda m: m.push(set()),
        "t": _tuple_of_all,
        "\x85": lambda m: _tuple(m, 1),
        "\x86": lambda m: _tuple(m, 2),
        "\x87": lambda m: _tuple(m, 3),
        "l": _list_of_all,
        "d": _dict,
        "a": _append_one,
        "e": lambda m: _append(m, m.to_mark()),
        "s": _set_one,
        "u": lambda m: _set(m, m.to_mark()),
        "\x90": _add,
        "\x91": _frozenset,
        "h": lambda m: _get(m, m.take(1)[0]),
        "j": lambda m: _get(m, m.number("<I")),
        "q": lambda m: _put(m, m.take(1)[0]),
        "r": lambda m: _put(m, m.number("<I")),
        "\x94": lambda m: _put(m, len(m.memo)),
        "c": _global,
        "\x93": _stack_global,
        "R": _reduce,
        "\x81": _new,
        "\x92": _new_with_keywords,
        "b": _build,
        "Q": _outside,
        "\x82": _refuse_extension,
        "\x83": _refuse_extension,
        "\x84": _refuse_extension,
    }.items()
}
"""Pickle's instructions, protocols 1 to 5, without those that are text, deprecated, or leave the file."""
