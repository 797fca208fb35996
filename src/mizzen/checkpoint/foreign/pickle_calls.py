"""Which names a pickle may speak of, and what a call of each amounts to, without making it.

A name that is not here is refused before anything is done with it, and no name is ever looked up. Each row of `CALLS`
turns the arguments of one allowed name into a value by code of this file: tensors, ordered dicts, sizes, scalars of
numpy. An allowed name without a row becomes a placeholder. What copies its argument pays for it from the budget of the
reader, `pickles.py`.
"""

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
import torch

from mizzen.checkpoint.foreign.extent import Storage
from mizzen.checkpoint.foreign.values import DTYPES, Inert, Name, TensorRef
from mizzen.checkpoint.tagged_json import refuse_equal_hashes

PLAIN: Final = frozenset(
    {
        *(f"builtins.{name}" for name in ("set", "frozenset", "bytearray", "complex", "slice", "range")),
        *(f"builtins.{name}" for name in ("int", "float", "bool", "str", "bytes", "list", "dict", "tuple")),
        *(f"collections.{name}" for name in ("OrderedDict", "defaultdict", "Counter", "deque")),
        *("argparse.Namespace", "types.SimpleNamespace", "_codecs.encode", "copyreg._reconstructor", "builtins.object"),
        *(f"datetime.{name}" for name in ("datetime", "date", "time", "timedelta", "timezone")),
        *(f"pathlib.{name}" for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
        *("pathlib._local.PosixPath", "pathlib._local.WindowsPath", "uuid.UUID", "decimal.Decimal"),
        *("numpy.ndarray", "numpy.dtype"),
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
        *("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"),
        *(f"numpy.{name}" for name in ("bool_", "int32", "int64", "uint8", "float32", "float64")),
        *("torch.Size", "torch.device", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"),
        *(f"torch._utils._rebuild_{name}" for name in ("tensor", "tensor_v2", "tensor_v3", "parameter")),
        *("torch._utils._rebuild_parameter_with_state", "torch._tensor._rebuild_from_type_v2"),
        *("torch.storage.UntypedStorage", "torch.storage.TypedStorage", "torch.serialization._get_layout"),
    }
)
"""Plain data and tensors."""

STORAGES: Final = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
"""The first word of a storage's class, and the dtype of its elements."""

PACKAGES: Final = (
    *("deepspeed", "megatron", "transformers", "accelerate", "peft", "trl"),
    *("lightning", "lightning_fabric", "pytorch_lightning", "omegaconf"),
    *("torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed._tensor"),
    *("torch.distributed._shard", "torch.optim"),
)
"""Whose objects become placeholders."""

RENAMED: Final = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Python 2 called these modules otherwise."""


def storage_dtype(name: Name) -> str | None:
    """The dtype of a storage's elements by the name of its class: `torch.FloatStorage`, `torch.cuda.HalfStorage`."""
    word = name.name.removesuffix("Storage")
    return STORAGES.get(word) if name.module in ("torch", "torch.cuda") and word != name.name else None


def is_allowed(name: Name, packages: tuple[str, ...]) -> bool:
    """Whether a pickle may speak of this name."""
    if str(name) in PLAIN or storage_dtype(name):
        return True
    return any(name.module == package or name.module.startswith(f"{package}.") for package in (*PACKAGES, *packages))


Spend = Callable[[int], None]
Args = tuple[object, ...]

NUMPY_KINDS: Final = "biufc"
DEVICE: Final = 100
"""How many characters the name of a device may have."""


class Unreadable(Exception):
    """An argument that cannot be what it should be; the machine says where."""


class TypedStorage:
    """A storage of the file with the dtype that its class had; bytes when it had none."""

    __slots__ = ("bytes", "dtype")

    def __init__(self, storage: Storage, dtype: torch.dtype) -> None:
        self.bytes = storage
        self.dtype = dtype


def call(name: Name, args: Args, spend: Spend) -> object:
    """The value of a call, or a placeholder for it."""
    if (row := CALLS.get(str(name))) is None:
        return Inert(str(name), args)
    return row(args, spend)


def is_key(value: object) -> bool:
    """Whether a value may be a key or in a set: hashing it takes no time and runs no code."""
    if isinstance(value, tuple):
        return len(value) <= 16 and all(isinstance(part, str | bytes | int | float | None) for part in value)
    return value is None or isinstance(value, str | bytes | int | float | torch.dtype | Name | Inert)


def _items(value: object, spend: Spend) -> list[object]:
    if not isinstance(value, list | tuple | dict | set | frozenset):
        raise Unreadable(f"a list was expected, not {type(value).__name__}")
    spend(len(value))
    return [*value]


def _set(args: Args, spend: Spend) -> set[object]:
    items = _items(args[0], spend) if args else []
    if not all(map(is_key, items)):
        raise Unreadable("a set of something that is no number, string or name")
    refuse_equal_hashes(items)
    return set(items)


def _mapping(args: Args, spend: Spend) -> dict[object, object]:
    """OrderedDict() is filled afterwards; OrderedDict([...]) at once; defaultdict and Counter likewise."""
    given = [arg for arg in args if isinstance(arg, dict | list)]
    pairs: Iterable[object] = given[0].items() if given and isinstance(given[0], dict) else given[0] if given else ()
    rows: list[tuple[object, object]] = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not is_key(pair[0]):
            raise Unreadable("a dict of something other than pairs")
        spend(1)
        rows.append((pair[0], pair[1]))
    refuse_equal_hashes(key for key, _ in rows)
    return dict(rows)


def _size(args: Args, spend: Spend) -> tuple[object, ...]:
    return tuple(_items(args[0], spend)) if args else ()


def _complex(args: Args, spend: Spend) -> complex:
    real, imaginary = args
    if not isinstance(real, float | int) or not isinstance(imaginary, float | int):
        raise Unreadable("a complex number of something else than numbers")
    return complex(real, imaginary)


def _bytes(args: Args, spend: Spend) -> bytes:
    """bytearray(...) and, in old protocols, bytes as `_codecs.encode(text, "latin1")`."""
    value = args[0] if args else b""
    if isinstance(value, str) and len(args) == 2 and args[1] in ("latin1", "latin-1"):
        value = value.encode("latin1")
    if not isinstance(value, bytes):
        raise Unreadable(f"bytes of {type(value).__name__}")
    spend(len(value) // 64)
    return bytes(value)


def _text(args: Args, spend: Spend) -> object:
    """A device or a layout: its name is all there is to it."""
    if not all(isinstance(arg, int) or (isinstance(arg, str) and len(arg) <= DEVICE) for arg in args[:2]):
        raise Unreadable("a device or a layout without a name")
    return ":".join(str(arg) for arg in args[:2])


def _reconstructor(args: Args, spend: Spend) -> object:
    kind, _, *rest = args
    if not isinstance(kind, Name):
        raise Unreadable("an object of no class")
    return Inert(str(kind), tuple(rest))


def _numpy_dtype(args: Args, spend: Spend) -> object:
    return Inert("numpy.dtype", args)


def numpy_dtype(value: object) -> np.dtype[np.generic]:
    """A dtype of plain numbers; never one of objects."""
    text = value.args[0] if isinstance(value, Inert) and value.name == "numpy.dtype" and value.args else None
    if not isinstance(text, str) or len(text) > 4 or text.lstrip("<|=")[:1] not in NUMPY_KINDS:
        raise Unreadable("an array of something else than numbers")
    try:
        return np.dtype(text)
    except TypeError as error:
        raise Unreadable(f"an array of {text!r}") from error


def _numpy_scalar(args: Args, spend: Spend) -> object:
    dtype, data = args
    kind = numpy_dtype(dtype)
    if not isinstance(data, bytes) or len(data) != kind.itemsize:
        raise Unreadable("a number of numpy without its bytes")
    return np.frombuffer(data, kind)[0].item()


def _numpy_array(args: Args, spend: Spend) -> object:
    """An empty array, whose state follows: see `numpy_array`."""
    return Inert("numpy.ndarray")


def _numpy_buffer(args: Args, spend: Spend) -> object:
    """An array at once, in protocol 5: (bytes, dtype, shape, order)."""
    data, dtype, shape, order = args
    return Inert("numpy.ndarray", state=numpy_array((1, shape, dtype, order == "F", data), spend))


def numpy_array(state: object, spend: Spend) -> object:
    """An array from the state that pickle gives it: (version, shape, dtype, is it Fortran's order, bytes).

    The bytes are paid for each time: many arrays may be made of the same ones.
    """
    match state:
        case (_, tuple() as shape, dtype, bool() as fortran, bytes() as data):
            spend(len(data) // 64)
            kind, count = numpy_dtype(dtype), 1
            for size in shape:
                if type(size) is not int or size < 0 or len(shape) > 32:
                    raise Unreadable("an array with impossible sizes")
                count *= size
            if count * kind.itemsize != len(data):
                raise Unreadable(f"an array of {count} numbers in {len(data)} bytes")
            return np.frombuffer(data, kind).reshape(shape, order="F" if fortran else "C")
    raise Unreadable("an array of something else than numbers")


def _tensor(args: Args, spend: Spend) -> TensorRef:
    """_rebuild_tensor(storage, offset, size, stride) and v2, which adds what a tensor in a file has no use for."""
    storage, offset, size, stride, *_ = args
    return _ref(storage, offset, size, stride, None)


def _tensor_v3(args: Args, spend: Spend) -> TensorRef:
    storage, offset, size, stride, _, _, dtype, *_ = args
    return _ref(storage, offset, size, stride, dtype)


def _ref(storage: object, offset: object, size: object, stride: object, dtype: object) -> TensorRef:
    if not isinstance(storage, TypedStorage) or not isinstance(size, tuple) or not isinstance(stride, tuple):
        raise Unreadable("a tensor without storage or sizes")
    if type(offset) is not int:
        raise Unreadable("a tensor without an offset")
    return TensorRef(storage.bytes, dtype if isinstance(dtype, torch.dtype) else storage.dtype, size, stride, offset)


def _parameter(args: Args, spend: Spend) -> TensorRef:
    if not args or not isinstance(args[0], TensorRef):
        raise Unreadable("a parameter that is no tensor")
    return args[0]


def _of_type(args: Args, spend: Spend) -> object:
    """A tensor with attributes or of a subclass: the tensor in it."""
    function, _, inner, *_ = args
    if not isinstance(function, Name) or str(function) not in TENSORS or not isinstance(inner, tuple):
        raise Unreadable("a tensor of a class that keeps its values elsewhere")
    return CALLS[str(function)](inner, spend)


TENSORS: Final = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}

CALLS: Final[dict[str, Callable[[Args, Spend], object]]] = {
    **TENSORS,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": _mapping,
    "collections.Counter": _mapping,
    "builtins.set": _set,
    "builtins.frozenset": _set,
    "builtins.complex": _complex,
    "builtins.bytearray": _bytes,
    "_codecs.encode": _bytes,
    "copyreg._reconstructor": _reconstructor,
    "torch.Size": _size,
    "torch.device": _text,
    "torch.serialization._get_layout": _text,
    "numpy.dtype": _numpy_dtype,
    **{f"numpy.{core}.multiarray.scalar": _numpy_scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": _numpy_array for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _numpy_buffer for core in ("core", "_core")},
}


def constant(name: Name) -> object:
    """What a name stands for by itself: a dtype of torch is a value, all else stays a name."""
    return DTYPES.get(str(name), name)
