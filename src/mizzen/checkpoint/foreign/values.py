"""What a pickle may turn into: plain data, tensors that are still in their file, and placeholders for everything else.

`Inert` stands for an object of a class that is never imported: its name, arguments and state can be looked at, and
nothing of it can be called. `plain` turns a tree of these into plain data with its tensors read. `expect` and its like
look into a tree that came from a file: what is not as it should be is an error with file and key.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from mizzen.checkpoint.foreign.extent import Extent, Storage
from mizzen.checkpoint.manifest import LONGEST
from mizzen.errors import CheckpointError

EXPANDED: Final = 2**20
"""How many bytes an expanded tensor may have more than its file holds."""
SHARED: Final = 2**26
"""How many bytes tensors may have together beyond those of the files that they lie in."""
DEPTH: Final = 100
"""How deep plain data may be nested."""
DTYPES: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@runtime_checkable
class Readable(Protocol):
    """A tensor that is still in its file, or in several."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        ...

    def paths(self) -> Iterable[Path]:
        """The files that it is in."""
        ...

    def read(self) -> Tensor:
        """The whole tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a class or function. It is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Inert:
    """An object that was not made: its class's name, what it would have been made from, and its state."""

    name: str
    args: tuple[object, ...] = ()
    state: object = None
    items: list[object] = field(default_factory=list)

    def get(self, key: str) -> object:
        """What the object's attribute `key` would have been; None if the state has no such thing."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        for state in states:
            if isinstance(state, Mapping) and key in state:
                return state[key]
        return None


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor that is still in its file."""

    storage: Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    """In elements, from the start of the storage."""

    def __post_init__(self) -> None:
        if len(self.shape) > 64 or len(self.shape) != len(self.stride):
            raise self._bad("these are not the sizes of a tensor")
        if not all(map(_is_count, (*self.shape, *self.stride, self.offset))):
            raise self._bad("these are not the sizes of a tensor")
        if (self.offset + self._span) * self.dtype.itemsize > self.storage.length:
            raise self._bad(f"its storage has {self.storage.length} bytes only")
        if self.numel * self.dtype.itemsize > max(self.storage.length, EXPANDED):
            raise self._bad(f"it would be expanded from {self.storage.length} bytes")

    @property
    def numel(self) -> int:
        """How many elements there are."""
        return math.prod(self.shape)

    @property
    def _span(self) -> int:
        """How many elements lie between the first and the last, both included."""
        if not self.numel:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after another."""
        return self.stride == contiguous(self.shape) or self._span == self.numel <= 1

    def read(self) -> Tensor:
        """The whole tensor, contiguous."""
        size = self.dtype.itemsize
        flat = self.storage.tensor(self.offset * size, self._span * size).view(self.dtype)
        if self.is_contiguous or not self.numel:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self.stride).contiguous()

    def paths(self) -> tuple[Path, ...]:
        """The file that it is in."""
        return (self.storage.extent.path,)

    def elements(self, start: int, count: int) -> Tensor:
        """Some elements of a flat tensor."""
        if start < 0 or count < 0 or start + count > self.numel:
            raise self._bad(f"elements {start} to {start + count} were asked for")
        if not self.is_contiguous:
            return self.read().flatten()[start : start + count]
        size = self.dtype.itemsize
        return self.storage.tensor((self.offset + start) * size, count * size).view(self.dtype)

    def _bad(self, reason: str) -> CheckpointError:
        is_shape = len(self.shape) <= 64 and all(map(_is_count, self.shape))
        shape = str(list(self.shape)) if is_shape else f"{len(self.shape)} dimensions"
        return CheckpointError(f"{self.storage.extent.path}: a tensor of {self.dtype} {shape}: {reason}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**62


class TooDeep(Exception):
    """A tree that has no end, or none that is near."""


def written_out(tree: object) -> int:
    """How many values a tree has if what is shared counts each time; a list or dict that contains itself is refused.

    Objects that were not made may point back to each other: what is in each of them counts once.
    """
    inside: dict[int, list[object]] = {}
    own: dict[int, int] = {}
    uses: dict[int, int] = {}
    starts: list[object] = [tree]
    rest = [tree]
    while rest:
        value = rest.pop()
        if id(value) in inside:
            continue
        held = _held(value)
        own[id(value)] = 1 + len(held) + sum(len(each) // 64 for each in held if isinstance(each, str | bytes))
        parts: list[object] = [each for each in held if isinstance(each, HOLDERS)]
        inside[id(value)] = parts
        rest += parts
        for part in parts:
            if isinstance(part, Inert):
                starts.append(part)
            else:
                uses[id(part)] = uses.get(id(part), 0) + 1
    return _times(starts, inside, own, uses)


def _times(starts: list[object], inside: dict[int, list[object]], own: dict[int, int], uses: dict[int, int]) -> int:
    """The sum of what each value counts for times how often it is reached, parents before what they hold."""
    times = {id(start): 1 for start in starts}
    rest = [start for start in {id(start): start for start in starts}.values() if not uses.get(id(start))]
    total = done = 0
    while rest:
        value = rest.pop()
        count, done = times[id(value)], done + 1
        total += count * own[id(value)]
        for part in inside[id(value)]:
            if not isinstance(part, Inert):
                times[id(part)] = times.get(id(part), 0) + count
                uses[id(part)] -= 1
                if not uses[id(part)]:
                    rest.append(part)
    if done < len(inside):
        raise TooDeep("a list or dict in it contains itself")
    return total


def _held(value: object) -> list[object]:
    """What a value holds."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, Inert):
        return [*value.args, value.state, *value.items]
    return [*value] if isinstance(value, list | tuple | set | frozenset) else []


HOLDERS: Final = (dict, list, tuple, set, frozenset, Inert)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def plain(value: object) -> object:
    """A tree of plain data. Tensors are read; placeholders become dicts.

    What is shared stays shared, so a small file cannot become a large tree.
    """
    return _plain(value, _Walk(), 0)


@dataclass(slots=True)
class _Walk:
    """What one walk through a tree has made, and what its tensors may still take."""

    seen: dict[int, object] = field(default_factory=dict)
    files: set[Path] = field(default_factory=set)
    room: int = SHARED
    """Bytes: tensors may share those of their files, but not for ever."""

    def read(self, value: "Readable") -> Tensor:
        """A tensor, if all of them together are not much larger than their files."""
        for path in {*value.paths()} - self.files:
            self.files.add(path)
            self.room += Extent.of_file(path).solid
        self.room -= math.prod(value.shape) * value.dtype.itemsize
        if self.room < 0:
            raise TooDeep(f"tensors in it share their bytes: together they have {SHARED:,} more than their files")
        return value.read()


def _plain(value: object, walk: _Walk, depth: int) -> object:
    if value is None or isinstance(value, str | bytes | int | float | complex | torch.dtype):
        return value
    seen = walk.seen
    if depth > DEPTH:
        raise TooDeep(f"plain data is nested more than {DEPTH} deep")
    if id(value) in seen:
        if (found := seen[id(value)]) is seen:
            raise TooDeep("plain data contains itself")
        return found
    seen[id(value)] = seen
    found = _converted(value, walk, depth + 1)
    seen[id(value)] = found
    return found


def _converted(value: object, walk: _Walk, depth: int) -> object:
    match value:
        case Readable():
            return walk.read(value)
        case dict():
            # Keys are numbers, strings or names: the reader sees to it.
            return {key: _plain(item, walk, depth) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return type(value)(_plain(item, walk, depth) for item in value)
        case Name():
            return {"class": str(value)}
        case Inert(name="numpy.ndarray"):
            return value.state
        case Inert():
            found = {"class": value.name}
            parts = {"args": value.args, "state": value.state, "items": value.items}
            return found | {key: _plain(part, walk, depth) for key, part in parts.items() if part}
    return value


Kind = TypeVar("Kind")


def expect(value: object, kind: type[Kind], where: str) -> Kind:
    """The value, which must be of a kind."""
    if not isinstance(value, kind):
        raise CheckpointError(f"{where}: a {kind.__name__} was expected, not {type(value).__name__}")
    return value


def is_name(value: object) -> bool:
    """Whether it is a text that may be a name: of one that is long, each use would cost."""
    return isinstance(value, str) and len(value) <= LONGEST


def name_in(value: object, where: str) -> str:
    """A name."""
    found = expect(value, str, where)
    if not is_name(found):
        raise CheckpointError(f"{where}: a name of {len(found):,} characters; at most {LONGEST:,} are read")
    return found


def entries(value: object, where: str) -> Mapping[str, object]:
    """A dict with names for keys; None is an empty one."""
    found = {} if value is None else expect(value, dict, where)
    if not all(map(is_name, found)):
        raise CheckpointError(f"{where}: has keys that are no names, or names of more than {LONGEST:,} characters")
    return found


def shape_of(value: object, where: str) -> tuple[int, ...]:
    """A shape: some sizes."""
    found = value if isinstance(value, list) else expect(value, tuple, where)
    if len(found) > 64 or not all(type(size) is int and 0 <= size < 2**62 for size in found):
        raise CheckpointError(f"{where}: is no shape")
    return tuple(found)


def count_of(value: object, where: str) -> int:
    """A number of things."""
    if type(value) is not int or not 0 <= value < 2**62:
        raise CheckpointError(f"{where}: is no number of elements")
    return value


def number_in(value: object) -> object:
    """The value of an enumeration's placeholder, or the value itself."""
    return value.args[0] if isinstance(value, Inert) and len(value.args) == 1 else value


def tensors(value: object, where: str) -> tuple[dict[str, TensorRef], list[str]]:
    """The tensors of a state dict, and the names of what else is in it."""
    found = entries(value, where)
    return (
        {name: ref for name, ref in found.items() if isinstance(ref, TensorRef)},
        [name for name, ref in found.items() if not isinstance(ref, TensorRef)],
    )
