"""From a plain model to sharded units: values of the first rank, masters in one flat tensor for each share."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mizzen.comm import collectives
from mizzen.model.sketch import ParameterSketch
from mizzen.offload.places import OffloadSettings
from mizzen.offload.rest import RestingPlaces
from mizzen.parallel.zero.full.division import Owners, Unit
from mizzen.parallel.zero.full.init import EarlyShard, early_shard
from mizzen.parallel.zero.full.quantized import Packed, Quantizing, gather_quantized, gather_rows, is_packed
from mizzen.parallel.zero.full.sharded_parameter import (
    RECORD,
    ShardedParameter,
    chunk,
    find_record,
    padded_length,
    up,
    whole_view,
)
from mizzen.parallel.zero.full.unit import LiveUnit, Message, Share, UnitParameter, UnitRanks
from mizzen.parallel.zero.live import stepped_of
from mizzen.parallel.zero.reduce import Reduction, torch_dtype
from mizzen.parallel.zero.stock import Stock, Sums
from mizzen.precision.policy import Policy, wider

Places = Mapping[int, Sequence[tuple[nn.Module, str]]]


@dataclass(frozen=True, slots=True)
class FullHolding:
    """How units are held, as plain values of the plan."""

    reduction: Reduction
    """Over the ranks that share one copy."""
    between: Reduction
    """Over the copies, where there are several."""
    policy: Policy
    ahead: int = 1
    """Elements that are gathered before they are needed, in whole units; 0 is none."""
    weight: float = 1.0
    """What makes of the mean over these ranks the mean that is asked for, which may be over more or fewer."""
    gain: float = 1.0
    quantizing: Quantizing = Quantizing()
    owners: Owners = ()
    """Who steps the parameters that their rule needs whole."""
    offload: OffloadSettings = OffloadSettings()
    nvme_bytes: int = 0
    """Bytes of masters and states that are to rest on NVMe."""
    stays: bool = False
    """Whether units stay gathered while a batch goes through a pipeline."""


def assemble(
    model: nn.Module,
    units: Sequence[Unit],
    holding: FullHolding,
    ranks: UnitRanks,
    stock: Stock,
    resting: RestingPlaces,
) -> tuple[LiveUnit, ...]:
    """Shard the units of a model."""
    modules, places = dict(model.named_modules()), _places(model)
    return tuple(_live(model, unit, modules[unit.path], holding, ranks, stock, places, resting) for unit in units)


def _places(model: nn.Module) -> Places:
    """For every parameter the modules that have it, with its name there."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append((module, leaf))
    return found


def _live(
    model: nn.Module,
    unit: Unit,
    module: nn.Module,
    holding: FullHolding,
    ranks: UnitRanks,
    stock: Stock,
    places: Places,
    resting: RestingPlaces,
) -> LiveUnit:
    own = dict(model.named_parameters())
    trained: dict[int, list[ParameterSketch]] = {}
    frozen: dict[tuple[torch.dtype, bool], list[ParameterSketch]] = {}
    for each in unit.parameters:
        if each.is_trained:
            trained.setdefault(each.group or 0, []).append(each)
        else:
            packs = holding.quantizing.frozen and is_packed(each, ranks.mesh.size())
            frozen.setdefault((torch_dtype(holding.policy.held(each.dtype)), packs), []).append(each)
    count = 0
    shares, flats, found = [], [], list[UnitParameter]()
    master = torch_dtype(unit.master or "float32")
    held = torch_dtype(unit.gathers_as or unit.master or "float32")
    for group, sketches in trained.items():
        flat, inside = _cut(sketches, own, places, ranks, stock.device, (master, held))
        for one in inside:
            one.start, count = count, count + one.length
        states = torch_dtype(wider(holding.policy.states, unit.master or "float32"))
        is_whole = sketches[0].is_whole
        rest = resting.rest("device" if is_whole else unit.place, f"{unit.title} {group}")
        values = _values_apart(flat, inside, held) if rest.place != "device" else flat
        kept = rest.keep(flat, values)
        stepped = kept.new_empty(0, dtype=states) if is_whole else stepped_of(kept, states)
        shares.append(Share(group, tuple(inside), values, kept, stepped, rest, is_whole))
        flats.append(values[: sum(each.length for each in inside)])
        found += inside
    messages = [Message(tuple(found), tuple(flats), held)] if found else []
    for (dtype, packs), sketches in frozen.items():
        flat, inside = _cut(sketches, own, places, ranks, stock.device, (dtype, dtype), is_trained=False)
        if packs:
            messages.append(_packed(inside))
        elif messages and messages[0].dtype == dtype:
            first = messages[0]
            messages[0] = Message((*first.parameters, *inside), (*first.flats, _exact(flat, inside)), dtype)
        else:
            messages.append(Message(tuple(inside), (_exact(flat, inside),), dtype))
        found += inside
    accumulation = torch_dtype(wider(holding.policy.accumulation, unit.held)) if unit.held else torch.float32
    return LiveUnit(
        plan=unit,
        module=module,
        parameters={each.name: each for each in found},
        shares=tuple(shares),
        messages=tuple(messages),
        sums=Sums(stock, count, accumulation, padding=up(count) - count),
        ranks=ranks,
        stock=stock,
        gather_rows=gather_quantized if holding.quantizing.weights else gather_rows,
    )


def _values_apart(flat: Tensor, parameters: Iterable[UnitParameter], dtype: torch.dtype) -> Tensor:
    """Shards in the dtype in which they are gathered, apart from their masters."""
    values = flat.to(dtype, copy=True)
    for each in parameters:
        each.shard = each.master(values)
    return values


def _exact(flat: Tensor, parameters: Iterable[UnitParameter]) -> Tensor:
    return flat[: sum(each.length for each in parameters)]


def _cut(
    sketches: Sequence[ParameterSketch],
    own: Mapping[str, nn.Parameter],
    places: Places,
    ranks: UnitRanks,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    is_trained: bool = True,
) -> tuple[Tensor, list[UnitParameter]]:
    """Move this rank's shards of some parameters into one flat tensor, and empty the parameters.

    The first rank's values count. The dtypes are those of the shards and of what is gathered.
    """
    kept, held = dtypes
    size = ranks.mesh.size()
    lengths = [padded_length(torch.Size(each.shape), size) for each in sketches]
    flat = torch.zeros(up(sum(lengths)), dtype=kept, device=device)
    found: list[UnitParameter] = []
    offset = 0
    for each, length in zip(sketches, lengths, strict=True):
        parameter, shape = own[each.name], torch.Size(each.shape)
        memory = torch.empty(length * size, dtype=held, device=device)
        made = UnitParameter(
            name=each.name,
            parameter=parameter,
            shape=shape,
            mesh=ranks.mesh,
            is_trained=is_trained,
            shard=flat,
            places=tuple(places[id(parameter)]),
            memory=memory,
            offset=offset,
            kind=nn.Parameter if isinstance(parameter, ShardedParameter) else type(parameter),
        )
        first, last = chunk(shape[made.dim], ranks.mesh)
        sizes = [last - first if dim == made.dim else extent for dim, extent in enumerate(shape)]
        made.shard = flat[offset : offset + torch.Size(sizes).numel()].view(sizes)
        made.shard.copy_(_values(parameter, made, ranks, kept))
        _empty(made)
        found.append(made)
        offset += length
    return flat, found


def _values(parameter: nn.Parameter, made: UnitParameter, ranks: UnitRanks, dtype: torch.dtype) -> Tensor:
    """This rank's part of a parameter, as the first rank has it."""
    early = find_record(parameter)
    if isinstance(early, EarlyShard):
        return early_shard(early, ranks.mesh)
    whole = parameter.detach().to(made.memory.device, dtype, copy=True).contiguous()
    collectives.broadcast(whole, group=ranks.everyone, group_src=0)
    first, last = chunk(made.shape[made.dim], ranks.mesh)
    return whole.narrow(made.dim, first, last - first)


def _empty(made: UnitParameter) -> None:
    """Let a parameter have the memory that it is gathered into, and shard it."""
    parameter = made.parameter
    parameter.__class__ = made.kind
    parameter.grad = None
    parameter.data = whole_view(made.memory, made.shape)
    parameter.grad_dtype = None  # as it comes: adding it up in another dtype is ours to do
    vars(parameter)[RECORD] = made
    made.is_gathered = True
    made.show_shard()


def _packed(parameters: Sequence[UnitParameter]) -> Message:
    """Let frozen shards rest, and travel, in blocks."""
    for each in parameters:
        padded = each.shard.new_zeros(each.length)
        padded[: each.shard.numel()] = each.shard.reshape(-1)
        each.shard = Packed.of(padded, each.shard.shape)
    held = tuple(each.shard.held for each in parameters if isinstance(each.shard, Packed))
    return Message(tuple(parameters), held, torch.uint8, is_packed=True)
