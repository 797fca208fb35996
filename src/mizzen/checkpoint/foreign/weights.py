"""Plain weights as a Source: one file of `torch.save` or safetensors, or a folder with an index of several.

A safetensors file is a length, a header in JSON, and the bytes of the tensors; all of it is checked before use.
"""

import json
import struct
from typing import Final

from mizzen.checkpoint.foreign import torch_file
from mizzen.checkpoint.foreign.extent import Extent, Folder, Storage
from mizzen.checkpoint.foreign.optimizer_states import add_numbered, shared_names
from mizzen.checkpoint.foreign.source import ForeignSource
from mizzen.checkpoint.foreign.values import TensorRef, contiguous, entries, expect, shape_of
from mizzen.checkpoint.tensors import CODES
from mizzen.errors import CheckpointError

HEADER: Final = 100_000_000
"""How many bytes the header of a safetensors file may have, as in safetensors itself."""
SAFETENSORS_DTYPES: Final = {code: dtype for dtype, code in CODES.items()}


def load_safetensors(file: Extent) -> tuple[dict[str, TensorRef], dict[str, object]]:
    """Name -> tensor, and the file's metadata."""
    (length,) = struct.unpack("<Q", file.part(0, 8, "the length of its header").bytes(8, "a number"))
    where = str(file.path)
    table = entries(_parse(file.part(8, length, "its header").bytes(HEADER, "its header"), where), where)
    data = file.part(8 + length, file.length - 8 - length, "its data")
    metadata = entries(table.get("__metadata__"), f"{where}: __metadata__")
    found = {name: _safetensors_entry(data, name, value) for name, value in table.items() if name != "__metadata__"}
    if (used := max((ref.storage.extent.start + ref.storage.length for ref in found.values()), default=data.start)) != (
        end := data.start + data.length
    ):
        raise CheckpointError(f"{where}: its tensors end at byte {used} and the file at byte {end}")
    return found, dict(metadata)


def _safetensors_entry(data: Extent, name: str, value: object) -> TensorRef:
    where = f"{data.path}: {name[:200]!r}"
    row = entries(value, where)
    dtype = SAFETENSORS_DTYPES.get(str(row.get("dtype")))
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


def _parse(data: bytes, where: str) -> object:
    """JSON that somebody else wrote."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: its JSON cannot be read: {error}") from error


def read_index(file: Extent) -> dict[str, str]:
    """The `weight_map` of an index: name of a tensor -> name of its file."""
    where = str(file.path)
    tree = entries(_parse(file.bytes(HEADER, "an index"), where), where)
    found = entries(tree.get("weight_map"), f"{where}: weight_map")
    if not found:
        raise CheckpointError(f"{where}: has no weight_map")
    return {name: expect(value, str, f"{where}: the file of {name}") for name, value in found.items()}


MODELS: Final = ("model", "module", "state_dict", "model_state_dict", "model_state")
"""Keys under which programs keep the weights beside other things."""
OPTIMIZERS: Final = ("optimizer", "optim", "optimizer_state_dict", "optimizer_states")
INDICES: Final = (
    *("model.safetensors.index.json", "pytorch_model.bin.index.json"),
    *("diffusion_pytorch_model.safetensors.index.json", "adapter_model.safetensors.index.json"),
)
SINGLES: Final = (
    *("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin"),
    *("diffusion_pytorch_model.safetensors", "consolidated.safetensors"),
)


def open_file(file: Extent, inert: tuple[str, ...]) -> ForeignSource:
    """One file."""
    if file.path.suffix == ".safetensors":
        found, metadata = load_safetensors(file)
        source = ForeignSource(file.path, "safetensors", notes={"metadata": metadata})
        for name, ref in found.items():
            source.add("model", name, ref, where=file.path)
        return source
    return _state_dict(torch_file.load(file, inert=inert), file)


def _state_dict(tree: object, file: Extent) -> ForeignSource:
    where = str(file.path)
    top = entries(tree, where)
    source = ForeignSource(file.path, "torch state dict")
    key = next((key for key in MODELS if isinstance(top.get(key), dict)), None)
    model = entries(top[key], f"{where}: {key}") if key else top
    for name, value in model.items():
        if isinstance(value, TensorRef):
            source.add("model", name, value, where=where)
        else:
            source.left_out.append(f"model/{name}: not a tensor")
    if not source.table:
        raise CheckpointError(f"{where}: has no tensors at its top and none under {', '.join(MODELS)}")
    source.notes["aliases"] = shared_names(model, where)
    if key is None:
        return source
    rest = {name: value for name, value in top.items() if name != key}
    for name in OPTIMIZERS:
        state = rest.get(name)
        state = state[0] if isinstance(state, list) and len(state) == 1 else state
        if isinstance(state, dict) and "param_groups" in state and "state" in state:
            add_numbered(source, model, state, skip=set(), where=where)
            rest[name] = {"param_groups": state["param_groups"]}
    source.notes["client_state"] = rest
    return source


def find(folder: Folder) -> str | None:
    """The file by which a folder of weights is read."""
    known = next((name for name in (*INDICES, *SINGLES) if folder.has(name)), None)
    if known is not None:
        return known
    alone = [name for name in folder.names() if name.endswith(".safetensors")]
    return alone[0] if len(alone) == 1 else None


def open_folder(folder: Folder, name: str, inert: tuple[str, ...]) -> ForeignSource:
    """A folder of weights, by the file that `find` gave."""
    if not name.endswith(".index.json"):
        return open_file(folder.file(name), inert)
    source = ForeignSource(folder.path, f"sharded weights ({name})")
    files: dict[str, ForeignSource] = {}
    for tensor, part in read_index(folder.file(name)).items():
        if part not in files:
            files[part] = open_file(folder.file(part), inert)
        recipe = files[part].table.get(("model", tensor))
        if recipe is None:
            raise CheckpointError(f"{folder.path / name}: {tensor!r} should be in {part!r}, and is not")
        source.add("model", tensor, recipe, where=folder.path / name)
    source.left_out += [f"{part}: {sentence}" for part, found in files.items() for sentence in found.left_out]
    source.notes["files"] = sorted(files)
    return source
