"""Files of safetensors: a length, a table in JSON, and the bytes of the tensors, all checked before use."""

import json
import struct
from typing import Final

from mizzen.checkpoint.foreign.extent import Extent, Storage
from mizzen.checkpoint.foreign.tree import entries, expect, shape_of
from mizzen.checkpoint.foreign.values import TensorRef, contiguous
from mizzen.checkpoint.tensors import CODES
from mizzen.errors import CheckpointError

TABLE: Final = 100_000_000
"""How many bytes the table may have, as in safetensors itself."""
DTYPES: Final = {code: dtype for dtype, code in CODES.items()}


def load(file: Extent) -> tuple[dict[str, TensorRef], dict[str, object]]:
    """Name -> tensor, and the file's metadata."""
    (length,) = struct.unpack("<Q", file.part(0, 8, "the length of its table").bytes(8, "a number"))
    where = str(file.path)
    table = entries(parse(file.part(8, length, "its table").bytes(TABLE, "its table"), where), where)
    data = file.part(8 + length, file.length - 8 - length, "its data")
    metadata = entries(table.get("__metadata__"), f"{where}: __metadata__")
    found = {name: _tensor(data, name, value) for name, value in table.items() if name != "__metadata__"}
    if (used := max((ref.storage.extent.start + ref.storage.length for ref in found.values()), default=data.start)) != (
        end := data.start + data.length
    ):
        raise CheckpointError(f"{where}: its tensors end at byte {used} and the file at byte {end}")
    return found, dict(metadata)


def _tensor(data: Extent, name: str, value: object) -> TensorRef:
    where = f"{data.path}: {name[:200]!r}"
    row = entries(value, where)
    dtype = DTYPES.get(str(row.get("dtype")))
    if dtype is None:
        raise CheckpointError(f"{where}: has the dtype {str(row.get('dtype'))[:40]!r}, which is not known")
    shape = shape_of(row.get("shape"), f"{where}: shape")
    match row.get("data_offsets"):
        case [int() as start, int() as end] if 0 <= start <= end:
            part = data.part(start, end - start, repr(name[:200]))
        case _:
            raise CheckpointError(f"{where}: data_offsets are not two numbers in order")
    ref = TensorRef(Storage(part), dtype, shape, contiguous(shape))
    if ref.numel * dtype.itemsize != part.length:
        raise CheckpointError(
            f"{where}: {dtype} {list(shape)} needs {ref.numel * dtype.itemsize} bytes, not {part.length}"
        )
    return ref


def parse(data: bytes, where: str) -> object:
    """JSON from a stranger."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: its JSON cannot be read: {error}") from error


def index(file: Extent) -> dict[str, str]:
    """The `weight_map` of an index: name of a tensor -> name of its file."""
    where = str(file.path)
    tree = entries(parse(file.bytes(TABLE, "an index"), where), where)
    found = entries(tree.get("weight_map"), f"{where}: weight_map")
    if not found:
        raise CheckpointError(f"{where}: has no weight_map")
    return {name: expect(value, str, f"{where}: the file of {name}") for name, value in found.items()}
