"""Tensors as bytes, and the safetensors layout: a length, a JSON header, one tensor after the other."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from mizzen.errors import UsageError

CODES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The dtypes that the format has, under its names."""
DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
"""These dtypes by torch's own names."""
SLAB: Final = 1 << 26
"""Bytes that are moved at once: a device's tensor needs no more room on the host."""
Named = tuple[str, torch.dtype, Sequence[int]]


def name_of(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def header_of(tensors: Iterable[Named], metadata: dict[str, str] | None = None) -> bytes:
    """The beginning of a file that holds these tensors in this order, padded to eight bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"} | (metadata or {})}
    place = 0
    for name, dtype, shape in tensors:
        if dtype not in CODES:
            raise UsageError(f"'{name}' is {dtype}, which safetensors does not have; it has {', '.join(DTYPES)}")
        end = place + dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """The elements of a tensor in their order, in slabs; those of a device come to the host slab by slab."""
    if not tensor.numel():
        return
    flat = tensor.detach().contiguous().reshape(-1)
    step = max(1, SLAB // flat.element_size())
    for start in range(0, len(flat), step):
        yield memory_of(flat[start : start + step].cpu())


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, in place."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def by_number(name: str) -> list[str | int]:
    """A key by which names sort as people count: layer 2 before layer 10."""
    return [int(part) if re.fullmatch(r"[0-9]{1,18}", part) else part for part in re.split(r"([0-9]+)", name)]
