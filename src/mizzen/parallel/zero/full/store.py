"""The sharded parameters of one part. What the engine asks of it is `plan.parts.Store`."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mizzen.comm import groups
from mizzen.comm.backend import Tag
from mizzen.comm.communicator import take_parted
from mizzen.errors import CommError, UsageError
from mizzen.kernels.norm import sum_of_squares
from mizzen.model.home import Site
from mizzen.model.piece import Piece, piece_of_boxes
from mizzen.offload.rest import RestingPlaces
from mizzen.optim.own_rules import Portion
from mizzen.parallel.zero.full.assemble import FullHolding, assemble
from mizzen.parallel.zero.full.calls import lead, let_go, watch_parts
from mizzen.parallel.zero.full.division import Unit
from mizzen.parallel.zero.full.gradients import UnitGradients, UseOutside
from mizzen.parallel.zero.full.owned import Wholes
from mizzen.parallel.zero.full.quantized import Packed, QuantizedReducer
from mizzen.parallel.zero.full.runtime import Position, UnitRuntime, check_places, explained
from mizzen.parallel.zero.full.sharded_parameter import RECORD, gather_shards
from mizzen.parallel.zero.full.unit import LiveUnit, Share, ShareLot, UnitParameter, UnitRanks
from mizzen.parallel.zero.reduce import Reducer, torch_dtype
from mizzen.parallel.zero.stock import Stock
from mizzen.parallel.zero.store import part_for
from mizzen.parallel.zero.twins import GradientHook
from mizzen.plan.parts import ReducedGradients, StoreContents, StoreRanks, StoreStatus


class FullStore:
    """The units of one model."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        holding: FullHolding,
        ranks: UnitRanks,
        sites: Mapping[str, Site] | None = None,
        uncounted: Collection[str] = (),
        twins: Mapping[str, GradientHook] | None = None,
        runtime: UnitRuntime | None = None,
    ) -> None:
        self.holding = holding
        self.sites = sites or {}
        self.uncounted = frozenset(uncounted)
        """Parameters that ranks elsewhere count, because they hold the same."""
        self.counts = ranks.copies is None or groups.get_rank(ranks.copies) == 0
        """Whether this rank's shards count in a norm, of which each is counted once."""
        self.ranks = StoreRanks(
            reduce_group=ranks.everyone,
            shard_group=ranks.sharers,
            replica_group=ranks.copies,
            cut_groups=ranks.others,
            mean_factor=holding.weight,
            step_factor=holding.gain,
        )
        is_first, self.runtime = runtime is None, runtime or UnitRuntime(Position())
        self.position = self.runtime.position
        self.parted: Tensor | None = None
        """On a device: whether the tags of some collective of this step have differed."""
        self.stock = Stock(torch.device(ranks.mesh.device_type))
        self.places = RestingPlaces(holding.offload, holding.nvme_bytes)
        self.units = assemble(model, units, holding, ranks, self.stock, self.places)
        self.device = self.units[0].device
        reducer = Reducer(holding.reduction, ranks.sharers, self.stock)
        if holding.quantizing.gradients:
            reducer = QuantizedReducer(
                holding.reduction, ranks.sharers, self.stock, holding.quantizing, lambda: self.position.step
            )
        copies = Reducer(holding.between, ranks.copies, self.stock)
        self.wholes = Wholes(self.units, holding.owners, ranks.sharers)
        lots = [ShareLot(unit, share) for unit in self.units for share in unit.shares if not share.is_whole]
        self.shares: Sequence[Share] = tuple(lot.share for lot in lots)
        """What the optimizer steps as it lies here, unit by unit."""
        group = ranks.everyone
        self.gradients = UnitGradients(self.units, reducer, copies, group, self.position, is_first=is_first)
        self.runtime.add(self.units, self.gradients, holding.ahead)
        self.gradients.finish_backward = self.runtime.finish
        for unit in self.units:
            lead(self.runtime, unit)
            for each in unit.parameters.values():
                each.touch = UseOutside(unit, self.gradients, self.runtime)
        self.handles = self._register_hooks(twins or {})
        self.contents = self._contents(lots)

    def _contents(self, lots: Sequence[ShareLot]) -> StoreContents:
        trained: dict[str, Any] = {each.name: each.parameter for unit in self.units for each in unit.trained}
        return StoreContents(
            trained=trained,
            held={name: each.parameter for unit in self.units for name, each in unit.parameters.items()},
            units=[tuple(unit.parameters) for unit in self.units],
            stays_gathered=self.holding.stays,
            sites=self.sites,
            saved_elsewhere=self.uncounted,
            lots=(*lots, *self.wholes.rounds),
            masters=[(share.group, share.stepped) for share in self.shares] + self.wholes.masters(),
            portions={share.stepped: _portions(share, self.sites) for share in self.shares} | self.wholes.portions(),
        )

    def _register_hooks(self, twins: Mapping[str, GradientHook]) -> list[RemovableHandle]:
        """Hear of state dicts and calls of the model; also what changes the gradients of some parameters."""
        root = self.units[0].module
        summed = ((each, twins.get(each.name)) for unit in self.units for each in unit.trained)
        return [
            *(each.parameter.register_hook(change) for each, change in summed if change is not None),  # type: ignore[no-untyped-call]
            root.register_state_dict_pre_hook(self._forget),
            root.register_load_state_dict_pre_hook(self._forget),
            root.register_load_state_dict_post_hook(lambda *_: self.restore_parameters({})),
            *watch_parts(self.units, self.runtime),
        ]

    @property
    def status(self) -> StoreStatus:
        """Sharded parameters stay where they are; somebody may hold them gathered."""
        return StoreStatus(is_gathered=any(unit.open for unit in self.units))

    # Gradients

    def begin_forward(self) -> None:
        """No gradient is on a parameter."""

    def begin_backward(self, last: bool | None) -> None:
        """A backward starts. Gradients leave at once whatever comes next: there is no room for whole ones."""
        self.gradients.begin_backward(last)

    def end_backward(self) -> None:
        """That backward is over, on every rank."""
        self.gradients.end_backward()

    def reduce(self) -> ReducedGradients:
        """Make every owned gradient complete."""
        self.gradients.reduce()
        return ReducedGradients(
            has_arrived=self.gradients.has_arrived,
            has_unannounced=self.gradients.has_unannounced,
            squares=self._squares,
            nonfinite=self._nonfinite,
        )

    def clear_gradients(self, *, taken: bool = False) -> None:
        """Forget all gradients, and what was lost on their way where nobody steps with them."""
        self.gradients.clear(taken=taken)

    def _squares(self) -> Tensor:
        counted: list[Tensor] = []
        for unit in self.units if self.counts else ():
            if self.uncounted.isdisjoint(each.name for each in unit.trained) and not _are_shared(unit, self.sites):
                counted.append(unit.gradient)
                continue
            for each in unit.trained:
                if each.name not in self.uncounted:
                    flat = each.gradient(unit.gradient).reshape(-1)
                    found = _own_ranges(each, self.sites)
                    counted += [flat] if found is None else [flat[start:stop] for start, stop in found]
        total = sum_of_squares(counted, device=self.device)
        self.parted = take_parted()
        return total if self.parted is None else torch.where(self.parted, torch.nan, total)

    def _nonfinite(self) -> list[str]:
        """On a device this is also where ranks that have parted ways find out, in the step that they must not take."""
        if self.parted is not None and bool(self.parted):
            raise explained(CommError("the ranks have parted ways in this step, which was not taken"))
        return [
            each.name
            for unit in self.units
            if unit.finite is not None
            for each, is_finite in zip(unit.trained, unit.finite.tolist(), strict=True)
            if not is_finite
        ]

    # Values

    def write_back(self) -> None:
        """Shards that are the masters stay, others get their values; what was gathered of the old ones is let go."""
        for lot in self.contents.lots:
            lot.write_back()
            lot.unload()
        for share in self.shares:
            for place, value in share.rest.arrived(share.values, share.master):
                place.copy_(value)
        self._forget()

    def restore_parameters(self, replaced: Mapping[str, Tensor] | None = None) -> None:
        """Forget what was gathered of shards that somebody has written to, and put them back in their modules.

        Sharded parameters are never moved. What came with another module, or by an assignment, is not sharded.
        """
        if replaced is None:
            return
        self._forget()
        self._keep_writes()
        check_places([unit for unit in self.units if not unit.open])
        for name in replaced:
            raise UsageError(
                f"'{name}' was replaced in the model, with its module or by an assignment, and nobody would train what "
                "came: put the module back and copy values into what GatheredParameters(..., modifier_rank=0) has "
                "gathered, or make a new engine of engine.module"
            )

    def _keep_writes(self) -> None:
        """Let masters that rest elsewhere have what somebody has written to the shards."""
        for share in self.shares:
            share.rest.keep_writes(share.values, share.master)

    def _forget(self, *_: Any) -> None:
        """Shard again whatever is gathered without need."""
        self.runtime.free()

    def update_copies(self, of: str, name: str, value: Callable[[], Tensor]) -> None:
        """A master has copies where it rests in another form or is gathered; a gradient has none."""
        if of == "gradient":
            return
        for unit in self.units:
            each = unit.parameters.get(name)
            if each is None:
                continue
            is_apart = isinstance(each.shard, Packed) or any(
                each in share.trained and share.rest.place != "device" for share in unit.shares
            )
            if unit.open or is_apart:
                whole = part_for(each.parameter, value(), self.sites.get(name))
                if is_apart:
                    each.write(whole)
                if unit.open:
                    with torch.no_grad():
                        each.parameter.copy_(whole)
        self._forget()

    # Pieces by name

    def pieces(self, of: str, states: Mapping[Tensor, Mapping[str, object]] | None = None) -> list[Piece]:
        """What this rank holds, by parameter name; masters of frozen parameters are these themselves.

        States that are not as large as what they belong to are left out.
        """
        if states is not None:
            found = []
            for share in self.shares:
                state = states.get(share.stepped, {}).get(of)
                if isinstance(state, Tensor) and state.shape == share.master.shape:
                    found += [
                        share.rest.readable(state, self._in_whole(_piece(each, each.master(state))))
                        for each in share.trained
                    ]
            return found + [self._in_whole(piece) for piece in self.wholes.state_pieces(states, of)]
        if of == "gradient":
            found = [_piece(each, each.gradient(unit.gradient)) for unit in self.units for each in unit.trained]
            return [self._in_whole(piece) for piece in found]
        self._keep_writes()
        shares = {each.name: share for share in self.shares for each in share.trained}
        found = []
        for each in (each for unit in self.units for each in unit.parameters.values()):
            its = shares.get(each.name)
            piece = self._in_whole(_piece(each, each.shard if its is None else each.master(its.master)))
            found.append(piece if its is None else its.rest.readable(its.master, piece))
        return found

    def _in_whole(self, piece: Piece) -> Piece:
        """A piece as a part of the whole parameter, where this rank's own tensor is a cut of it."""
        if (site := self.sites.get(piece.name)) is None:
            return piece
        boxes = tuple(found for box in piece.boxes for found in site.boxes_of(box))
        return piece_of_boxes(piece.name, site.shape, piece.data, boxes)

    @contextmanager
    def gather(self, names: Iterable[str]) -> Iterator[Mapping[str, Tensor]]:
        """The units of some parameters gathered; what stands in the modules then, by name."""
        wanted = set(names)
        units = [unit for unit in self.units if wanted.intersection(unit.parameters)]
        with ExitStack() as stack:
            for unit in units:
                stack.enter_context(self.runtime.held_open(unit))
            yield {name: each.parameter for unit in units for name, each in unit.parameters.items() if name in wanted}
            check_places(units)

    def release(self) -> None:
        """Give the module its parameters back, whole, on every rank; all ranks do this together."""
        if any(unit.open for unit in self.units):
            raise UsageError("destroy() or another initialize() inside GatheredParameters: leave the context first")
        for handle in self.handles:
            handle.remove()
        self.runtime.free()
        for unit in reversed(self.units):
            for name, each in unit.parameters.items():
                tag = Tag(self.position.step, name, "giving back")
                whole = gather_shards(each.shard, each.shape, each.dim, unit.ranks.sharers, tag=tag)
                held = torch_dtype(unit.plan.held) if unit.plan.held and each.is_trained else whole.dtype
                each.parameter.__class__ = each.kind
                each.parameter.data = whole.to(held)
                del vars(each.parameter)[RECORD]
            let_go(unit.module)
        self.runtime.units = tuple(unit for unit in self.runtime.units if unit not in self.units)
        self.units = self.gradients.units = self.shares = self.wholes.rounds = ()
        self.contents = StoreContents()
        self.stock.clear()
        self.places.close()


def _portions(share: Share, sites: Mapping[str, Site]) -> list[Portion]:
    return [
        Portion(each.name, each.offset, each.offset + each.shard.numel(), _own_ranges(each, sites, each.offset))
        for each in share.trained
    ]


def _are_shared(unit: LiveUnit, sites: Mapping[str, Site]) -> bool:
    """Whether other ranks of a cut axis hold a part of some of its parameters."""
    return any(sites[each.name].is_shared for each in unit.trained if each.name in sites)


def _own_ranges(each: UnitParameter, sites: Mapping[str, Site], offset: int = 0) -> tuple[tuple[int, int], ...] | None:
    """What a rank counts of a shard that lies at an offset; None is all of it."""
    site = sites.get(each.name)
    if site is None or not site.is_shared:
        return None
    boxes = [found for box in each.boxes for found in site.boxes_of(box)]
    return tuple((offset + part.start, offset + part.stop) for part in site.ranges(boxes) if part.is_counted)


def _piece(each: UnitParameter, data: Tensor) -> Piece:
    return Piece(each.name, tuple(each.shape), each.boxes, data)
