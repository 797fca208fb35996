"""Plain weights as a Source: one file of `torch.save` or safetensors, or a folder with an index of several."""

from typing import Final

from mizzen.checkpoint.foreign import safetensors, torch_file
from mizzen.checkpoint.foreign.collected import Collected
from mizzen.checkpoint.foreign.extent import Extent, Folder
from mizzen.checkpoint.foreign.numbered import add_numbered, shared_names
from mizzen.checkpoint.foreign.tree import entries
from mizzen.checkpoint.foreign.values import TensorRef
from mizzen.errors import CheckpointError

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


def open_file(file: Extent, inert: tuple[str, ...]) -> Collected:
    """One file."""
    if file.path.suffix == ".safetensors":
        found, metadata = safetensors.load(file)
        source = Collected(file.path, "safetensors", notes={"metadata": metadata})
        for name, ref in found.items():
            source.add("model", name, ref, where=file.path)
        return source
    return _state_dict(torch_file.load(file, inert=inert), file)


def _state_dict(tree: object, file: Extent) -> Collected:
    where = str(file.path)
    top = entries(tree, where)
    source = Collected(file.path, "torch state dict")
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


def open_folder(folder: Folder, name: str, inert: tuple[str, ...]) -> Collected:
    """A folder of weights, by the file that `find` gave."""
    if not name.endswith(".index.json"):
        return open_file(folder.file(name), inert)
    source = Collected(folder.path, f"sharded weights ({name})")
    files: dict[str, Collected] = {}
    for tensor, part in safetensors.index(folder.file(name)).items():
        if part not in files:
            files[part] = open_file(folder.file(part), inert)
        recipe = files[part].table.get(("model", tensor))
        if recipe is None:
            raise CheckpointError(f"{folder.path / name}: {tensor!r} should be in {part!r}, and is not")
        source.add("model", tensor, recipe, where=folder.path / name)
    source.left_out += [f"{part}: {sentence}" for part, found in files.items() for sentence in found.left_out]
    source.notes["files"] = sorted(files)
    return source
