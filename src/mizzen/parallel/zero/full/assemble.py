"""From a plain model to sharded units: values of the first rank, masters in one flat tensor for each share."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mizzen.comm import collectives
from mizzen.model.sketch import ParameterSketch
from mizzen.parallel.zero.full.early import Early, recut, take_out
from mizzen.parallel.zero.full.frozen import is_packed
from mizzen.parallel.zero.full.live import LiveUnit, Share, Trained, local, up
from mizzen.parallel.zero.full.owners import Owners
from mizzen.parallel.zero.full.quantized import Quantizing
from mizzen.parallel.zero.full.sharded import carry, move
from mizzen.parallel.zero.full.units import Unit
from mizzen.parallel.zero.full.wrap import (
    Wrapping,
    pack_frozen,
    padded,
    put_back,
    rehouse,
    sharded,
    share_second_mesh,
    wrap,
)
from mizzen.parallel.zero.reduce import Reduction, torch_dtype
from mizzen.parallel.zero.stock import Stock, Sums
from mizzen.precision.policy import Policy, wider


@dataclass(frozen=True, slots=True)
class FullHolding:
    """How units are held, as plain values of the plan."""

    reduction: Reduction
    """Over the ranks that share one copy."""
    between: Reduction
    """Over the copies, where there are several."""
    policy: Policy
    wrapping: Wrapping
    gain: float = 1.0
    quantizing: Quantizing = Quantizing()
    owners: Owners = ()
    """Who steps the parameters that their rule needs whole."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who shares what with whom."""

    mesh: DeviceMesh
    """The ranks that share one copy of the parameters."""
    sharers: ProcessGroup
    """The same as a group."""
    copies: ProcessGroup | None
    """The ranks that hold the same shards; None where nobody else does."""
    everyone: ProcessGroup
    """All over which gradients are averaged."""


def assemble(
    model: nn.Module, units: Sequence[Unit], holding: FullHolding, ranks: Ranks, stock: Stock
) -> tuple[tuple[LiveUnit, ...], list[tuple[Tensor, str]]]:
    """Shard the units of a model; also the objects that were its parameters, with their names."""
    modules = dict(model.named_modules())
    moved: list[tuple[Tensor, str]] = []
    first: nn.Module | None = None
    for unit in units:
        module, keeps = modules[unit.path], holding.wrapping.keeps if unit.path else 0
        moved += _wrap(model, unit, module, holding, ranks, second=keeps if first is None else 0)
        if keeps and first is not None:
            share_second_mesh(first, module)
        first = first or (module if keeps else None)
    return tuple(_live(model, unit, modules[unit.path], holding.policy, stock) for unit in units), moved


def _wrap(
    model: nn.Module, unit: Unit, module: nn.Module, holding: FullHolding, ranks: Ranks, *, second: int
) -> list[tuple[Tensor, str]]:
    """Give a unit's parameters the first rank's values and the dtype of their masters, and shard them."""
    own = dict(model.named_parameters())
    wanted = {each.name: own[each.name] for each in unit.parameters}
    early = {name: parameter for name, parameter in wanted.items() if isinstance(parameter, Early)}
    for name, stand_in in take_out(model, early).items():
        wanted[name] = stand_in
    device = torch.device(ranks.mesh.device_type)
    for each in unit.parameters:
        parameter = wanted[each.name]
        dtype = _dtype(each, unit, holding.policy)
        if each.name in early:
            continue
        parameter.data = parameter.data.to(device, dtype, non_blocking=True).contiguous()
        collectives.broadcast(parameter.data, group=ranks.everyone, group_src=0)
    wrap(unit, module, list(wanted.values()), ranks.mesh, holding.wrapping, second=second)
    facts = {each.name: each for each in unit.parameters}
    shards = {
        name: local(recut(parameter, ranks.mesh)).to(_dtype(facts[name], unit, holding.policy))
        for name, parameter in early.items()
    }
    put_back(model, module, shards, ranks.mesh)
    if holding.quantizing.frozen:
        pack_frozen(model, module, {each.name for each in unit.parameters if is_packed(each, ranks.mesh.size())})
    there = dict(model.named_parameters())
    for name, parameter in (wanted | early).items():
        carry(parameter, there[name])
        move(parameter, name)
    return [(parameter, name) for name, parameter in (wanted | early).items()]


def _dtype(parameter: ParameterSketch, unit: Unit, policy: Policy) -> torch.dtype:
    """That of a master, or that in which a frozen parameter is held."""
    if parameter.is_trained and unit.master is not None:
        return torch_dtype(unit.master)
    return torch_dtype(policy.held(parameter.dtype))


def _live(model: nn.Module, unit: Unit, module: nn.Module, policy: Policy, stock: Stock) -> LiveUnit:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    facts = {each.name: each for each in unit.parameters}
    found: dict[str, DTensor] = {}
    trained: dict[int, list[Trained]] = {}
    sizes: dict[int, int] = {}
    place = 0
    for parameter, length in zip(sharded(module), padded(module), strict=True):
        if not isinstance(parameter, DTensor):
            raise AssertionError(f"FSDP2 holds a {type(parameter).__name__}")
        name = names[id(parameter)]
        found[name] = parameter
        if facts[name].is_trained:
            group = facts[name].group or 0
            offset = sizes.get(group, 0)
            trained.setdefault(group, []).append(Trained(name, parameter, place, length, offset))
            sizes[group] = offset + length
            place += length
    device = next((local(each).device for each in found.values()), torch.device("cpu"))
    dtype = torch_dtype(wider(policy.accumulation, unit.held)) if unit.held else torch.float32
    return LiveUnit(
        plan=unit,
        module=module,
        parameters=found,
        shares=tuple(
            _share(unit, module, group, each, policy, is_whole=facts[each[0].name].is_whole)
            for group, each in trained.items()
        ),
        sums=Sums(stock, place, dtype, padding=up(place) - place),
        device=device,
    )


def _share(
    unit: Unit, module: nn.Module, group: int, trained: Sequence[Trained], policy: Policy, *, is_whole: bool
) -> Share:
    """Move the shards of a group into one tensor."""
    first = local(trained[0].parameter)
    master = first.new_zeros(up(trained[-1].offset + trained[-1].length))
    for each in trained:
        rehouse(module, each.parameter, master[each.offset : each.offset + each.length])
    states = wider(policy.states, unit.master or "float32")
    dtype = torch_dtype(states)
    stepped = master.new_empty(0, dtype=dtype) if is_whole else master.to(dtype)
    return Share(group, tuple(trained), master, stepped, is_whole)
