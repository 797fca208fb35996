"""Which names a pickle may speak of. A name that is not here is refused before anything is done with it.

Nothing is imported or called in any case: calls of these names are interpreted by `calls.py`, or become placeholders.
"""

from typing import Final

from mizzen.checkpoint.foreign.values import Name

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
