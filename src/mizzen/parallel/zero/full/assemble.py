"""From a plain model to sharded units: values of the first rank, masters in one flat tensor for each share."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mizzen.comm import collectives, groups
from mizzen.model.sketch import ParameterSketch
from mizzen.offload.places import DEVICE
from mizzen.offload.rest import RestingPlaces
from mizzen.offload.rest_host import OnHost
from mizzen.offload.shards import ShardPlaces, Shards, ShardsOnHost
from mizzen.parallel.zero.full.division import FullHolding, Unit
from mizzen.parallel.zero.full.init import BuiltShard, early_shard
from mizzen.parallel.zero.full.quantized import Packed, gather_quantized, gather_rows, is_packed
from mizzen.parallel.zero.full.sharded_parameter import (
    RECORD,
    ShardedParameter,
    chunk,
    find_record,
    padded_length,
    up,
    whole_view,
)
from mizzen.parallel.zero.full.share import Share, UnitParameter, UnitSums
from mizzen.parallel.zero.full.unit import LiveUnit, Message, UnitRanks
from mizzen.parallel.zero.live import stepped_of
from mizzen.parallel.zero.reduce import torch_dtype
from mizzen.parallel.zero.stock import Stock
from mizzen.precision.policy import wider

Places = Mapping[int, Sequence[tuple[nn.Module, str]]]


@dataclass(frozen=True, slots=True)
class UnitTiers:
    """Where the tensors of units may rest outside the device."""

    states: RestingPlaces
    """For masters and states."""
    shards: ShardPlaces

    @classmethod
    def of(cls, holding: FullHolding) -> "UnitTiers":
        """As the plan says."""
        masters = RestingPlaces(holding.offload, holding.nvme_bytes, shares_way=holding.parameters.is_on)
        return cls(masters, ShardPlaces(holding.parameters, *holding.shard_bytes))

    def close(self) -> None:
        """Give everything back."""
        self.states.close()
        self.shards.close()


def assemble(
    model: nn.Module,
    units: Sequence[Unit],
    holding: FullHolding,
    ranks: UnitRanks,
    stock: Stock,
    tiers: UnitTiers,
) -> tuple[LiveUnit, ...]:
    """Shard the units of a model."""
    modules, places = dict(model.named_modules()), _places(model)
    return tuple(_live(model, unit, modules[unit.path], holding, ranks, stock, places, tiers) for unit in units)


def _places(model: nn.Module) -> Places:
    """For every parameter the modules that have it, with its name there."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append((module, leaf))
    return found


Trained = Mapping[int, Sequence[ParameterSketch]]
Frozen = Mapping[tuple[torch.dtype, bool], Sequence[ParameterSketch]]


def _by_kind(unit: Unit, holding: FullHolding, ranks: UnitRanks) -> tuple[Trained, Frozen]:
    """Trained parameters by optimizer group; frozen ones by dtype, and whether they rest in blocks."""
    trained: dict[int, list[ParameterSketch]] = {}
    frozen: dict[tuple[torch.dtype, bool], list[ParameterSketch]] = {}
    for each in unit.parameters:
        if each.is_trained:
            trained.setdefault(each.group or 0, []).append(each)
        else:
            packs = holding.quantizing.frozen and is_packed(each, ranks.mesh.size())
            frozen.setdefault((torch_dtype(holding.policy.held(each.dtype)), packs), []).append(each)
    return trained, frozen


def _live(
    model: nn.Module,
    unit: Unit,
    module: nn.Module,
    holding: FullHolding,
    ranks: UnitRanks,
    stock: Stock,
    places: Places,
    tiers: UnitTiers,
) -> LiveUnit:
    own = dict(model.named_parameters())
    trained, frozen = _by_kind(unit, holding, ranks)
    count = 0
    shares, flats, rests, found = [], list[Tensor](), list[Shards | None](), list[UnitParameter]()
    master = torch_dtype(unit.master or "float32")
    held = torch_dtype(unit.gathers_as or unit.master or "float32")
    for group, sketches in trained.items():
        flat, inside = _cut(sketches, own, places, ranks, stock.device, (master, held))
        for one in inside:
            one.start, count = count, count + one.length
        states = torch_dtype(wider(holding.policy.states, unit.master or "float32"))
        is_whole = sketches[0].is_whole
        rest = tiers.states.rest(DEVICE if is_whole else unit.place, f"{unit.title} {group}")
        values, shards = _rested(flat.to(held) if unit.shard_place != DEVICE else flat, inside, unit, str(group), tiers)
        if isinstance(shards, ShardsOnHost) and type(rest) is OnHost:
            rest.beside, shards.masters_near = shards.beside, rest.masters_near
        if shards is None and rest.place != DEVICE:
            values = _values_apart(flat, inside, held)
        kept = rest.keep(flat, values if shards is None else None)
        stepped = kept.new_empty(0, dtype=states) if is_whole else stepped_of(kept, states)
        shares.append(Share(group, tuple(inside), values, kept, stepped, rest, shards, is_whole))
        flats.append(_exact(values, inside))
        rests.append(shards)
        found += inside
    messages = [Message(tuple(found), tuple(flats), held, tuple(rests))] if found else []
    for (dtype, packs), sketches in frozen.items():
        flat, inside = _cut(sketches, own, places, ranks, stock.device, (dtype, dtype), is_trained=False)
        flat, shards = _rested(flat, inside, unit, f"frozen {dtype}", tiers)
        if packs:
            messages.append(_packed(inside))
        elif messages and messages[0].dtype == dtype:
            first, flats = messages[0], [*messages[0].flats, _exact(flat, inside)]
            messages[0] = Message((*first.parameters, *inside), tuple(flats), dtype, (*first.rests, shards))
        else:
            messages.append(Message(tuple(inside), (_exact(flat, inside),), dtype, (shards,)))
        found += inside
    accumulation = torch_dtype(wider(holding.policy.accumulation, unit.held)) if unit.held else torch.float32
    return LiveUnit(
        plan=unit,
        module=module,
        parameters={each.name: each for each in found},
        shares=tuple(shares),
        messages=tuple(messages),
        sums=UnitSums(stock, count, accumulation, padding=up(count) - count, shares=shares),
        ranks=ranks,
        stock=stock,
        gather_rows=gather_quantized if holding.quantizing.weights else gather_rows,
    )


def _values_apart(flat: Tensor, parameters: Iterable[UnitParameter], dtype: torch.dtype) -> Tensor:
    """Shards in the dtype in which they are gathered, apart from their masters."""
    values = flat.to(dtype, copy=True)
    for each in parameters:
        each.stand = each.master(values)
    return values


def _rested(
    flat: Tensor, parameters: Iterable[UnitParameter], unit: Unit, kind: str, tiers: UnitTiers
) -> tuple[Tensor, Shards | None]:
    """Bring shards to their resting place; what stands for them, and where they are, unless that is the device."""
    if unit.shard_place == DEVICE:
        return flat, None
    shards = tiers.shards.shards(unit.shard_place, f"{unit.title} {kind}", flat)
    for each in parameters:
        each.stand, each.shards = each.master(shards.stand), shards
    return shards.stand, shards


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
            stand=flat,
            places=tuple(places[id(parameter)]),
            memory=memory,
            offset=offset,
            kind=nn.Parameter if isinstance(parameter, ShardedParameter) else type(parameter),
        )
        first, last = chunk(shape[made.dim], ranks.mesh)
        sizes = [last - first if dim == made.dim else extent for dim, extent in enumerate(shape)]
        made.stand = flat[offset : offset + torch.Size(sizes).numel()].view(sizes)
        made.stand.copy_(_values(parameter, made, ranks, kept))
        _empty(made)
        found.append(made)
        offset += length
    return flat, found


def _values(parameter: nn.Parameter, made: UnitParameter, ranks: UnitRanks, dtype: torch.dtype) -> Tensor:
    """This rank's part of a parameter, as the first rank has it."""
    early = find_record(parameter)
    if isinstance(early, BuiltShard):
        return early_shard(early, ranks.mesh)
    is_alone = groups.get_world_size(ranks.everyone) == 1
    whole = parameter.detach().to(made.memory.device, dtype, copy=not is_alone).contiguous()
    if not is_alone:
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
        padded = each.stand.new_zeros(each.length)
        padded[: each.stand.numel()] = each.stand.reshape(-1)
        each.stand = Packed.of(padded, each.stand.shape)
    held = tuple(each.stand.held for each in parameters if isinstance(each.stand, Packed))
    return Message(tuple(parameters), held, torch.uint8, (None,) * len(held), is_packed=True)
