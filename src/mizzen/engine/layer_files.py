"""The layers of a `PipelineModule` as files by hand, one for each: what its methods of DeepSpeed's names do.

`save_checkpoint` and `mizzen checkpoint export --layers` do this for training; here is what a program of its own does
with the layers of its stage, before an engine has the model or while one does.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mizzen.checkpoint.convert import save_torch
from mizzen.comm import collectives, groups
from mizzen.config.topology import ProcessTopology
from mizzen.engine.access import owner_of, set_full_value
from mizzen.errors import CheckpointError, UsageError
from mizzen.files import list_folder, make_folder
from mizzen.parallel.pipeline.module import LayeredModule, TiedLayerSpec, is_on_meta
from mizzen.parallel.zero.full.sharded_parameter import is_sharded


def layer_path(folder: str | Path, number: int, topology: ProcessTopology, rank: int) -> str:
    """The file of a layer: with the place of the rank, where layers are cut over several."""
    place = topology.get_rank_repr(rank)
    return str(Path(folder) / "-".join(filter(None, (f"layer_{number:02d}", place, "model_states.pt"))))


def layer_paths(folder: str | Path, number: int) -> list[str]:
    """The files of a layer that are there, of all ranks over which it is cut."""
    found = list_folder(folder) if Path(folder).is_dir() else []
    wanted = (f"layer_{number:02d}-", "model_states.pt")
    return [str(path) for path in found if path.name.startswith(wanted[0]) and path.name.endswith(wanted[1])]


def save_layers(
    model: LayeredModule, folder: str | Path, topology: ProcessTopology, rank: int, writer: Any, *, has_frozen: bool
) -> None:
    """Write the layers of this rank's stage; of ranks that have the same, the first writes.

    `writer` is an object with `save(state, path)`, or None.
    """
    layers = list(_layers(model))
    for _, module in layers:
        _refuse_parts(module, topology)
    if "data" in topology.axes and topology.get_coord(rank).data:
        return
    make_folder(folder)
    for number, module in layers:
        frozen = {name for name, each in module.named_parameters(remove_duplicate=False) if not each.requires_grad}
        state = {name: value for name, value in module.state_dict().items() if has_frozen or name not in frozen}
        path = Path(layer_path(folder, number, topology, rank))
        if writer is None:
            save_torch({name: _apart(value) for name, value in state.items()}, path)
        else:
            writer.save(state, str(path))


def load_layers(
    model: LayeredModule, folder: str | Path, topology: ProcessTopology, rank: int, reader: Any, *, strict: bool
) -> None:
    """Read the layers of this rank's stage, into the masters too where an engine has them.

    `reader` is an object with `load(path, map_location=...)`, or None.
    """
    for number, module in _layers(model):
        _refuse_parts(module, topology)
        path = layer_path(folder, number, topology, rank)
        if not Path(path).is_file():
            raise CheckpointError(f"{path}: there is no such file, and layer {number} is on this rank's stage")
        state = _read(path, reader)
        module.load_state_dict(state, strict=strict)
        for name, parameter in module.named_parameters():
            if name in state and owner_of(parameter) is not None:
                set_full_value(parameter, state[name])


def _layers(model: LayeredModule) -> Iterator[tuple[int, nn.Module]]:
    """The layers that this rank has built and that are modules, by number."""
    for number in model.own_numbers():
        if path := model.layer_list.layers[number].path:
            module = model.get_submodule(path)
            if is_on_meta(module):
                raise UsageError(
                    f"layer {number} is not built yet: how many stages there are is not known before initialize() "
                    "unless PipelineModule(num_stages=...) says so"
                )
            yield number, module


def _refuse_parts(module: nn.Module, topology: ProcessTopology) -> None:
    """Refuse layers of which a rank has a part that a file of the whole layer would be taken for."""
    for name, parameter in module.named_parameters():
        owner = owner_of(parameter)
        site = owner.store.contents.sites.get(owner.name) if owner is not None else None
        is_part = site is not None and tuple(site.shape) != tuple(parameter.shape)
        if is_sharded(parameter) or (is_part and topology.get_dim("model") < 2):
            raise UsageError(
                f"'{name}' of a layer is cut over ranks by its engine, so that no rank has the file of the layer: use "
                "engine.save_checkpoint() and load_checkpoint(), and `mizzen checkpoint export --layers`"
            )
        if is_part:
            raise UsageError(
                f"'{name}' of a layer comes cut over ranks, and an engine has it: write and read such layers before "
                "initialize(), or use engine.save_checkpoint() and load_checkpoint()"
            )


def _read(path: str, reader: Any) -> dict[str, Tensor]:
    found = (
        torch.load(path, map_location="cpu", weights_only=True)
        if reader is None
        else reader.load(path, map_location="cpu")
    )
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: has a {type(found).__name__} in it, and not the state of a layer")
    return found


def _apart(value: Any) -> Any:
    """A tensor with memory of its own: a file has all the memory that a tensor is a part of."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def tied_weights(model: LayeredModule, topology: ProcessTopology, rank: int) -> list[tuple[nn.Parameter, Any]]:
    """Weights of this rank that layers of several stages share, each with the group of ranks that have it.

    All ranks call this together, since groups are formed.
    """
    owners: dict[str, set[int]] = {}
    attributes: dict[str, list[str]] = {}
    for number, spec in enumerate(model.every_spec):
        if isinstance(spec, TiedLayerSpec):
            owners.setdefault(spec.key, set()).add(sum(number >= bound for bound in model.bounds[1:]))
            attributes.setdefault(spec.key, spec.tied_weight_attr)
    found = []
    for key, stages in owners.items():
        if len(stages) < 2:
            continue
        group = _group_of(topology, rank, sorted(stages))
        if group is not None:
            module = model.get_submodule(f"tied_modules.{key}")
            found += [(module.get_parameter(name), group) for name in attributes[key]]
    return found


def _group_of(topology: ProcessTopology, rank: int, stages: list[int]) -> Any:
    """Form the group of each column of ranks at these stages; returns this rank's own, if it is in one."""
    mine = None
    for ranks in topology.get_axis_comm_lists("pipe"):
        members = [each for each in ranks if topology.get_coord(each).pipe in stages]
        formed = groups.new_group(members)
        mine = formed if rank in members else mine
    return mine


def sum_tied_gradients(weights: list[tuple[nn.Parameter, Any]]) -> None:
    """Add the gradients of shared weights up over the stages that have them; an engine does so itself.

    A stage whose copy has no gradient brings zeros, since the others wait for it.
    """
    for weight, group in weights:
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        collectives.all_reduce(gradient, group=group)
        if weight.requires_grad:
            weight.grad = gradient
