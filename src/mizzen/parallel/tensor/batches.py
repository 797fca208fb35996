"""One batch for all ranks that share a matrix: given by the first of them, or compared when a model is first called."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from mizzen.accelerator import get_accelerator
from mizzen.comm import collectives, groups
from mizzen.comm.fingerprint import compare
from mizzen.comm.mesh import Mesh
from mizzen.config.layout import Layout
from mizzen.errors import CommError, UsageError
from mizzen.model.inputs import tensors_in
from mizzen.plan.parts import Parts

Batch = Mapping[str, Tensor]


def broadcast_batch(
    keys: Sequence[str], data: Batch | None, dtype: torch.dtype, group: ProcessGroup | None
) -> dict[str, Tensor]:
    """The tensors of these keys, of one dtype, from the first rank of the group. The others need not have any data."""
    device, is_first = get_accelerator().device(), group is None or group.rank() == 0
    told: list[Any] = [None]
    if is_first:
        told = [_problem(keys, data, dtype) or [tuple((data or {})[key].shape) for key in keys]]
    alone = group is None or group.size() == 1
    if not alone:
        collectives.broadcast_object_list(told, groups.get_global_rank(group, 0), group)
    if isinstance(told[0], str):
        raise UsageError(told[0])
    shapes: list[tuple[int, ...]] = told[0]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    if is_first:
        torch.cat([(data or {})[key].reshape(-1).to(device) for key in keys], out=flat)
    if not alone:
        collectives.broadcast(flat, group_src=0, group=group)
    parts = torch.split(flat, sizes)
    return {key: part.view(shape) for key, part, shape in zip(keys, parts, shapes, strict=True)}


def _problem(keys: Sequence[str], data: Batch | None, dtype: torch.dtype) -> str | None:
    """What the first rank cannot give, in words for all of them."""
    if data is None:
        return f"the first tensor-parallel rank has no data to take {', '.join(keys)} from"
    for key in keys:
        if key not in data:
            return f"the batch of the first tensor-parallel rank has no {key!r}; it has {', '.join(data)}"
        if data[key].dtype is not dtype:
            return f"{key!r} is of {data[key].dtype}, and all of {', '.join(keys)} were said to be of {dtype}"
    return None


def compare_first_batch(parts: Parts, mesh: Mesh) -> None:
    """Let ranks that share each matrix compare what the model is called with, the first time that it is; then no more.

    Later stages of a pipeline do not: what comes to them from the one before may be a part of the sequence on each.
    Not inside of a graph: there a module that was compiled as a whole does without.
    """
    group, module = mesh.group("tp"), parts[0].module
    if group.size() == 1 or mesh.coordinate("pp") > 0:
        return
    handle: list[RemovableHandle] = []

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        for each in handle:
            each.remove()
        compare_inputs(args, kwargs, group, mesh.layout)

    handle.append(module.register_forward_pre_hook(look, prepend=True, with_kwargs=True))


def compare_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], group: ProcessGroup, layout: Layout | None = None
) -> None:
    """Raise on every rank of the group unless all were given the same tensors; those that differ are named."""
    fields: dict[str, str] = {}

    def note(title: str, value: Any) -> None:
        found = [_described(tensor) for tensor in tensors_in(value)]
        fields.update({title if len(found) == 1 else f"{title}[{at}]": text for at, text in enumerate(found)})

    for place, value in enumerate(args):
        note(f"argument {place}", value)
    for key, value in kwargs.items():
        note(key, value)
    try:
        compare(fields, group, layout)
    except CommError as difference:
        raise UsageError(
            f"ranks that share each matrix (tensor parallelism) were given different batches, and would train on a "
            f"mixture of them: {difference}. Give them one batch: let engine.deepspeed_io() or training_data= make the "
            "loader, or a sampler with num_replicas=engine.dp_world_size and rank=engine.get_data_parallel_rank(); "
            "mizzen.tensor.broadcast_data sends that of the first of them to the others"
        ) from None


def _described(tensor: Tensor) -> str:
    """A tensor in few words that another one does not have: its dtype, its shape, and its bits by their places."""
    data = tensor.detach().contiguous().reshape(-1)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(data.element_size(), torch.int64)
    bits = data.view(width).to(torch.int64)
    places = torch.arange(len(bits), device=bits.device) % 65_521 + 1
    return f"{tensor.dtype} of shape {list(tensor.shape)} with checksum {int((bits * places).sum())}"
