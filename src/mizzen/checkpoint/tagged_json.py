"""Plain Python values as JSON and back, with what JSON would lose: tuples, keys that are no strings, paths, dates.

A value that JSON has is itself; any other is `{"$word": ...}`. Arrays and tensors are not in the JSON: they are data,
found by a name. What cannot be kept is refused by its path and type. Values out of a file are limited in what they may
become, those of a foreign pickle too: a small file must not become a large tree, nor a small tree a long wait.

[Note: values that share]
A list that holds another one twice, which holds another one twice, is small in memory and in a pickle. Walked, or
written as JSON, which knows no sharing, it has no end. Who walks such values counts what comes again.
"""

import base64
import datetime
import json
import math
import pickle
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from mizzen.checkpoint.manifest import DIMENSIONS, LONGEST
from mizzen.checkpoint.tensors import CODES, DTYPES, memory_of, name_of
from mizzen.errors import CheckpointError, UsageError

REPEATED: Final = 1_000_000
"""How many values that come again may be written again, all together."""
TEXT: Final = 16
"""So many characters of a text, or bytes, count as one value."""
EQUAL_HASHES: Final = 100
"""How many keys of one dict or set may have the same hash."""


class TooLarge(Exception):
    """A value that would take far more time or memory than its size; who reads it says where it is."""


class Repeats:
    """Counts what is visited again in one walk, with all that is in it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, int]] = {}
        self._left = REPEATED
        self._walked = 0

    def enter(self, value: object) -> int:
        """Begin with a value that holds others or is long; what is returned goes to `leave`."""
        _, size = self._known.get(id(value), (value, 0))
        self._left -= size
        if self._left < 0:
            raise TooLarge(f"values in it are shared: written out they are more than {REPEATED:,} values again")
        return self._walked

    def leave(self, value: object, entered: int) -> None:
        """The value is done with, and all that is in it."""
        self._walked += size_of(value)
        self._known[id(value)] = (value, self._walked - entered)  # the value is kept, so that its number stays its own


def size_of(value: object) -> int:
    """How many values a value counts for, without what is in those that it holds."""
    if isinstance(value, str | bytes | bytearray):
        return len(value) // TEXT
    return 1 + (len(value) if isinstance(value, list | tuple | dict | set | frozenset) else 0)


def refuse_equal_hashes(keys: Iterable[Any]) -> None:
    """Raise where keys of a dict or set have one hash: to put a million of those into it takes days."""
    count = max(Counter(map(hash, keys)).values(), default=0)
    if count > EQUAL_HASHES:
        raise TooLarge(f"{count} keys of one dict or set have the same hash; at most {EQUAL_HASHES} are read")


DEPTH: Final = 200
"""Values nested deeper than this are taken for one that contains itself."""
_NUMBERS: Final = "biuf"
"""The kinds of numpy's dtypes that are kept: truth values, whole numbers with and without sign, fractions."""
_SHOWN: Final = 200
"""Characters of a key that are part of a path."""
_BITS: Final = 14_000
"""Whole numbers of more bits are refused: Python itself reads and writes texts of at most 4,300 digits."""
_DICTS: Final[Mapping[type, str]] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


PICKLED: Final = (
    "the client state has a pickled value, and reading one runs whatever it says: set checkpoint.pickled_client_state "
    "to true if you trust whoever wrote this checkpoint"
)


def has_pickles(value: Any) -> bool:
    """Whether some of what was encoded is pickled."""
    rest = [value]
    while rest:
        found = rest.pop()
        if isinstance(found, dict) and len(found) == 1 and "$pickle" in found:
            return True
        rest += found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return False


class Encoder:
    """Turns values into JSON, and collects their arrays by name."""

    def __init__(self, root: str, *, allow_pickle: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._root = root
        self._pickles = allow_pickle
        self._repeats = Repeats()
        self._arrays: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._taken: Counter[str] = Counter()

    def encode(self, value: Any, path: str = "", depth: int = 0) -> Any:
        """The value as JSON. `path` is where it is, for errors."""
        path = path or self._root
        if depth > DEPTH:
            raise UsageError(f"{path[:200]}: nested deeper than {DEPTH}, or it contains itself")
        kind = type(value)
        if kind is int and value.bit_length() > _BITS:
            raise UsageError(f"{path} is an integer of {value.bit_length()} bits; a checkpoint keeps at most {_BITS}")
        if value is None or kind in (bool, int) or (kind is str and len(value) < TEXT):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        try:
            entered = self._repeats.enter(value)
        except TooLarge as error:
            raise UsageError(f"{path}: {error}; give a copy without what is shared, or less of it") from None
        found = self._inside(value, path, depth)
        self._repeats.leave(value, entered)
        return found

    def _inside(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind is str:
            return value
        if kind is list:
            return [self.encode(each, _step(path, f"[{n}]"), depth + 1) for n, each in enumerate(value)]
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(each, _step(path, f".{key[:_SHOWN]}"), depth + 1) for key, each in value.items()}
        return self._tagged(value, path, depth)

    def _tagged(self, value: Any, path: str, depth: int) -> dict[str, Any]:
        simple = _simple(value)
        if simple is not None:
            return simple
        if isinstance(value, Tensor) or _is_plain_array(value):
            return self._array(value, path)
        if type(value) in (tuple, torch.Size, set, frozenset):
            rows = [self.encode(each, _step(path, f"[{n}]"), depth + 1) for n, each in enumerate(value)]
            return {f"${type(value).__name__}": rows}
        if type(value) in _DICTS:
            return {f"${_DICTS[type(value)]}": self._pairs(value, path, depth)}
        if type(value) is Namespace:
            return {"$namespace": self._pairs(vars(value), path, depth)}
        if self._pickles:
            return {"$pickle": _base64(pickle.dumps(value))}
        raise UsageError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint does not keep. It "
            "keeps None, truth values, numbers, strings, bytes, lists, tuples, sets, dicts, paths, dates, arrays and "
            "tensors: give it as one of these, or set checkpoint.pickled_client_state"
        )

    def _pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
        return [
            [
                self.encode(key, _step(path, " (a key)"), depth + 1),
                self.encode(each, _step(path, f"[{_shown(key)}]"), depth + 1),
            ]
            for key, each in value.items()
        ]

    def _array(self, value: Any, path: str) -> dict[str, Any]:
        """An array, once however often it is there; the value itself is kept, so that its number stays its own."""
        if id(value) not in self._arrays:
            self._arrays[id(value)] = (value, self._new_array(value, path))
        return self._arrays[id(value)][1]

    def _new_array(self, value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, Tensor):
            word, tensor = "tensor", value.detach()
            if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
                raise UsageError(f"{path} is a {type(value).__name__}: give a plain tensor, with .full_tensor() or so")
        else:
            native = numpy.ascontiguousarray(value.astype(value.dtype.newbyteorder("="))).reshape(value.shape)
            word, tensor = "array", torch.from_numpy(native)
        if tensor.dtype not in CODES:
            raise UsageError(f"{path} is a tensor of {tensor.dtype}, which a checkpoint does not keep")
        if tensor.dim() > DIMENSIONS:
            raise UsageError(f"{path} has {tensor.dim()} dimensions; a checkpoint keeps at most {DIMENSIONS}")
        name = self._free(path)
        self.tensors[name] = tensor.to("cpu", copy=True).contiguous()
        return {f"${word}": name}

    def _free(self, path: str) -> str:
        """A name that no other array has: the path, or with a number where it is too long or taken."""
        start = name = path[: LONGEST - 20]
        while name in self.tensors or (name == start and start != path):
            self._taken[start] += 1
            name = f"{start} ({self._taken[start] + 1})"
        return name


def _step(path: str, piece: str) -> str:
    """A path with one more piece, cut off where it is longer than anybody reads."""
    return f"{path}{piece}"[:LONGEST]


def _shown(key: Any) -> str:
    """A key in a path. Of what is long or nested not all is written out."""
    if isinstance(key, tuple):
        return f"({', '.join('...' if isinstance(each, tuple) else _shown(each) for each in key[:8])})"
    if isinstance(key, str | bytes):
        return repr(key[:_SHOWN])
    return repr(key) if isinstance(key, int | float | complex | None) else type(key).__name__


def _is_plain_array(value: Any) -> bool:
    """Whether it is an array of numbers that torch has too, and no more than that: a mask would be lost."""
    return isinstance(value, numpy.ndarray) and not isinstance(value, numpy.ma.MaskedArray) and _is_kept(value.dtype)


def _is_kept(dtype: "numpy.dtype[Any]") -> bool:
    return dtype.kind in _NUMBERS and dtype.itemsize <= 8


def _simple(value: Any) -> dict[str, Any] | None:
    """Values without others inside."""
    found: dict[str, Any] | None = None
    if isinstance(value, numpy.generic) and _is_kept(value.dtype):
        number = value.item()
        found = {"$numpy": [value.dtype.name, number if not isinstance(number, float) else repr(number)]}
    elif type(value) in (bytes, bytearray):
        found = {f"${type(value).__name__}": _base64(value)}
    elif type(value) is complex:
        found = {"$complex": [repr(value.real), repr(value.imag)]}
    elif isinstance(value, Path | PurePosixPath):
        found = {"$path": str(value)}
    elif type(value) in (datetime.datetime, datetime.date, datetime.time):
        found = {f"${type(value).__name__}": value.isoformat()}
    elif type(value) is datetime.timedelta:
        found = {"$timedelta": [value.days, value.seconds, value.microseconds]}
    elif isinstance(value, torch.dtype):
        found = {"$dtype": name_of(value)}
    elif isinstance(value, torch.device):
        found = {"$device": str(value)}
    return found


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def pack(value: Any) -> Tensor:
    """A value, arrays and all, as bytes in a tensor."""
    encoder = Encoder("value")
    body = encoder.encode(value)
    arrays = {
        name: [name_of(tensor.dtype), list(tensor.shape), _base64(memory_of(tensor).tobytes())]
        for name, tensor in encoder.tensors.items()
    }
    text = json.dumps({"value": body, "arrays": arrays}, allow_nan=False).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def unpack(packed: Tensor) -> Any:
    """What was packed."""
    try:
        found = json.loads(memory_of(packed).tobytes())
        arrays = {
            name: torch.frombuffer(bytearray(base64.b64decode(data)), dtype=DTYPES[dtype]).view(shape)
            for name, (dtype, shape, data) in found["arrays"].items()
        }
        value = found["value"]
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"a value of the checkpoint cannot be read: {type(error).__name__}: {error}") from error
    return decode(value, lambda name: arrays[name])


def decode(value: Any, read: Callable[[str], Tensor], *, allow_pickle: bool = False) -> Any:
    """What was encoded. `read` gives arrays by their name."""
    try:
        return _Decoder(read, allow_pickle).decode(value)
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"a value of the checkpoint cannot be read: {type(error).__name__}: {error}") from error
    except TooLarge as error:
        raise CheckpointError(f"a value of the checkpoint is not read: {error}") from None


class _Decoder:
    def __init__(self, read: Callable[[str], Tensor], allow_pickle: bool) -> None:
        self._read = cache(read)  # an array that is there twice is one array, as it was
        self._pickles = allow_pickle

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(each) for each in value]
        if not isinstance(value, dict):
            return value
        if len(value) == 1 and (word := next(iter(value))).startswith("$"):
            return self._tagged(word[1:], value[word])
        return {key: self.decode(each) for key, each in value.items()}

    def _tagged(self, word: str, value: Any) -> Any:
        if word in _SIMPLE:
            return _SIMPLE[word](value)
        if word in _ROWS:
            rows = [self.decode(each) for each in value]
            if word in ("set", "frozenset"):
                refuse_equal_hashes(rows)
            return _ROWS[word](rows)
        if word in ("dict", "ordered", "counter", "namespace"):
            pairs = [(self.decode(key), self.decode(each)) for key, each in value]
            refuse_equal_hashes(key for key, _ in pairs)
            if word == "namespace":
                return Namespace(**dict(pairs))
            if word == "counter":
                return Counter(dict(pairs))
            return dict(pairs) if word == "dict" else OrderedDict(pairs)
        if word in ("tensor", "array"):
            tensor = self._read(str(value))
            return tensor if word == "tensor" else tensor.numpy()
        if word == "pickle":
            if not self._pickles:
                raise CheckpointError(PICKLED)
            return pickle.loads(base64.b64decode(value))  # noqa: S301  asked for by a key
        raise CheckpointError(f"a value of the checkpoint is of the unknown kind {word[:40]!r}")


_ALL_DTYPES: Final = {name_of(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_ROWS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "tuple": tuple,
    "Size": lambda sizes: torch.Size([*sizes]),
    "set": set,
    "frozenset": frozenset,
}
_SIMPLE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "float": float,
    "numpy": lambda pair: _number(*pair),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "complex": lambda pair: complex(float(pair[0]), float(pair[1])),
    "path": Path,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "dtype": lambda name: _ALL_DTYPES[name],
    "device": torch.device,
}


def _number(name: str, value: Any) -> Any:
    dtype = numpy.dtype(name)
    if dtype.kind not in _NUMBERS:
        raise ValueError(f"{name!r} is no dtype of numbers")
    return dtype.type(float(value) if dtype.kind == "f" else value)
