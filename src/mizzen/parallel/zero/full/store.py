"""The sharded parameters of one part. What the engine asks of it is `plan.parts.Store`."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mizzen.comm import groups
from mizzen.comm.backend import Tag
from mizzen.comm.communicator import take_parted
from mizzen.errors import CommError, UsageError
from mizzen.kernels.norm import squares_of
from mizzen.model.home import Site
from mizzen.model.piece import Piece, piece_of_boxes
from mizzen.offload.away import check_here
from mizzen.offload.places import DEVICE
from mizzen.optim.own_rules import Portion
from mizzen.parallel.zero.full.assemble import UnitTiers, assemble
from mizzen.parallel.zero.full.calls import lead, let_go, watch_parts
from mizzen.parallel.zero.full.division import FullHolding, Unit
from mizzen.parallel.zero.full.gradients import UnitGradients, UseOutside
from mizzen.parallel.zero.full.owned import Wholes
from mizzen.parallel.zero.full.quantized import Packed, QuantizedReducer
from mizzen.parallel.zero.full.runtime import Position, UnitRuntime, check_places, explained
from mizzen.parallel.zero.full.sharded_parameter import RECORD, gather_shards, use_refusal
from mizzen.parallel.zero.full.share import Share, UnitParameter
from mizzen.parallel.zero.full.unit import LiveUnit, ShareLot, UnitRanks
from mizzen.parallel.zero.reduce import Reducer, torch_dtype
from mizzen.parallel.zero.stock import Stock
from mizzen.parallel.zero.store import part_for
from mizzen.parallel.zero.twins import GradientHook
from mizzen.plan.parts import ReducedGradients, StoreContents, StoreMemory, StoreRanks, StoreStatus


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
        self.tiers = UnitTiers.of(holding)
        self.units = assemble(model, units, holding, ranks, self.stock, self.tiers)
        self.device = self.units[0].device
        reducer = Reducer(holding.reduction, ranks.sharers, self.stock)
        if holding.quantizing.gradients:
            position = self.position  # without the store, which has the reducer
            reducer = QuantizedReducer(
                holding.reduction, ranks.sharers, self.stock, holding.quantizing, lambda: position.step
            )
        copies = Reducer(holding.between, ranks.copies, self.stock)
        self.wholes = Wholes(self.units, holding.owners, ranks.sharers)
        backwards = reversed(self.units)  # as a backward completes them
        lots = [ShareLot(unit, share) for unit in backwards for share in unit.shares if not share.is_whole]
        self.shares: Sequence[Share] = tuple(share for share in _shares_of(self.units) if not share.is_whole)
        """What the optimizer steps as it lies here, unit by unit."""
        group = ranks.everyone
        self.gradients = UnitGradients(self.units, reducer, copies, group, self.position, is_first=is_first)
        self.runtime.add(self.units, self.gradients, holding.ahead)
        self.gradients.finish_backward, self.gradients.unit_done = self.runtime.finish, self.tiers.states.bring_next
        for unit in self.units:
            unit.sums.count_squares = partial(_squares_of, self, unit)
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
        return StoreStatus(self._memory, is_gathered=any(unit.open for unit in self.units))

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
        """Unit by unit, so that it does not depend on which of them were counted before, as their sums left."""
        if any(unit.sums.is_away for unit in self.units):
            total = torch.cat([unit.sums.squares() for unit in self.units]).sum()
        else:
            total = _squares_of(self, *self.units).sum()
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
        """Shards that are the masters stay, others get their values; what was gathered of the old ones is let go.

        A lot that the host steps beside the next forward is left to it.
        """
        for lot in self.contents.lots:
            if not (isinstance(lot, ShareLot) and lot.share.is_beside):
                lot.write_back()
                lot.unload()
        for share in _shares_of(self.units):
            share.finish()
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
        for share in _shares_of(self.units):
            check_here(share.values, "the model")
            share.keep_writes()

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
            is_apart = isinstance(each.stand, Packed) or each.shards is not None
            is_apart |= any(each in share.trained and share.rest.place != DEVICE for share in unit.shares)
            if unit.open or is_apart:
                whole = part_for(each.parameter, value(), self.sites.get(name))
                if is_apart:
                    each.write(whole)
                if unit.open:
                    with torch.no_grad():
                        each.parameter.copy_(whole)
        self._forget()

    # Pieces by name

    def pieces(
        self, of: str, states: Mapping[Tensor, Mapping[str, object]] | None = None, only: str | None = None
    ) -> list[Piece]:
        """What this rank holds, by parameter name; masters of frozen parameters are these themselves.

        States that are not as large as what they belong to are left out.
        """
        units = [unit for unit in self.units if only is None or only in unit.parameters]
        if states is not None:
            found = []
            for share in self.shares:
                state = states.get(share.stepped, {}).get(of)
                if isinstance(state, Tensor) and state.shape == share.master.shape:
                    check_here(state, f"the state '{of}'")
                    found += [
                        share.rest.readable(state, _in_whole(self.sites, _piece(each, each.master(state))))
                        for each in share.trained
                        if only in (None, each.name)
                    ]
            wholes = [piece for piece in self.wholes.state_pieces(states, of) if only in (None, piece.name)]
            for piece in wholes:
                check_here(piece.data, f"the state '{of}'")
            return found + [_in_whole(self.sites, piece) for piece in wholes]
        if of == "gradient":
            trained = ((each, data) for unit in units for each, data in unit.sums.gradients())
            return [_in_whole(self.sites, _piece(each, data)) for each, data in trained if only in (None, each.name)]
        self._keep_writes()
        shares = {each.name: share for share in _shares_of(units) for each in share.trained}
        found = []
        for each in (each for unit in units for each in unit.parameters.values() if only in (None, each.name)):
            its = shares.get(each.name)
            piece = _in_whole(self.sites, _piece(each, each.stand if its is None else each.master(its.master)))
            if its is not None:
                piece = its.rest.readable(its.master, piece)
            elif each.shards is not None:
                piece = each.shards.readable(piece)
            found.append(piece)
        return found

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

    # Memory that leaves the device for a while

    def _memory(self) -> StoreMemory:
        """The shards, their masters and what there is of gradients; whatever is gathered is sharded again."""
        if any(unit.open for unit in self.units):
            raise UsageError("offload_states() inside GatheredParameters: leave the context first")
        self._forget()
        self.stock.drop_free()
        messages = [message for unit in self.units for message in unit.messages]
        gradients = [each.parameter.grad for unit in self.units for each in unit.trained]
        gradients += [unit.sums.tensor for unit in self.units]
        reducer = self.gradients.reducer
        gradients += reducer.errors.values() if isinstance(reducer, QuantizedReducer) else ()
        return StoreMemory(
            values=[
                flat
                for message in messages
                for flat, rest in zip(message.flats, message.rests, strict=True)
                if rest is None
            ],
            masters=[share.master for unit in self.units for share in unit.shares],
            gradients=[each for each in gradients if each is not None],
            returned=self.stock.note_addresses,
        )

    def release(self) -> None:
        """Give the module its parameters back, whole, on every rank; all ranks do this together."""
        if any(unit.open for unit in self.units):
            raise UsageError("destroy() or another initialize() inside GatheredParameters: leave the context first")
        for handle in self.handles:
            handle.remove()
        try:
            self.runtime.free()
            _give_back(self.units, self.position.step)
        finally:  # also where what rests on a disk cannot be read any more
            _take_apart(self.units, self.runtime, self.gradients)
            self.units = self.gradients.units = self.shares = self.wholes.rounds = ()
            self.contents = StoreContents()
            self.stock.clear()
            self.tiers.close()


def _shares_of(units: Sequence[LiveUnit]) -> Iterator[Share]:
    """All shares, those too that are stepped by owners of whole parameters."""
    return (share for unit in units for share in unit.shares)


def _in_whole(sites: Mapping[str, Site], piece: Piece) -> Piece:
    """A piece as a part of the whole parameter, where this rank's own tensor is a cut of it."""
    if (site := sites.get(piece.name)) is None:
        return piece
    boxes = tuple(found for box in piece.boxes for found in site.boxes_of(box))
    return piece_of_boxes(piece.name, site.shape, piece.data, boxes)


def _portions(share: Share, sites: Mapping[str, Site]) -> list[Portion]:
    return [
        Portion(each.name, each.offset, each.offset + each.stand.numel(), _own_ranges(each, sites, each.offset))
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


def _give_back(units: Sequence[LiveUnit], step: int) -> None:
    """Let parameters be whole again, and plain."""
    for unit in reversed(units):
        for name, each in unit.parameters.items():
            tag = Tag(step, name, "giving back")
            whole = gather_shards(each.shard, each.shape, each.dim, unit.ranks.sharers, tag=tag)
            held = torch_dtype(unit.plan.held) if unit.plan.held and each.is_trained else whole.dtype
            each.parameter.__class__ = each.kind
            each.parameter.data = whole.to(held) if each.shards is None else whole.to("cpu", held)
            del vars(each.parameter)[RECORD]


def _take_apart(units: Sequence[LiveUnit], runtime: UnitRuntime, gradients: UnitGradients) -> None:
    """Part units, which nobody runs any more, from those that they tell of calls and gradients.

    These know the units, too: each would keep the others in memory until the collector of garbage comes by.
    """
    runtime.remove(units, gradients)
    gradients.finish_backward = gradients.unit_done = _nothing
    for unit in units:
        let_go(unit.module)
        unit.sums.count_squares = _no_squares
        for each in unit.parameters.values():
            each.touch = _refuse_use


def _nothing() -> None: ...


def _no_squares() -> Tensor:
    return torch.zeros(0)


def _refuse_use(one: UnitParameter, operation: str) -> Tensor:
    raise use_refusal(one.name, operation)


def _squares_of(store: FullStore, *units: LiveUnit) -> Tensor:
    """The sums of squares of what a rank counts of the gradients of units, one after the other, in one pass."""
    flats = [flat for unit in units for flat in _counted(unit, store.sites, store.uncounted)]
    return squares_of(flats if store.counts else [], device=store.device)


def _counted(unit: LiveUnit, sites: Mapping[str, Site], uncounted: Collection[str]) -> list[Tensor]:
    """What a rank counts of the gradients of a unit."""
    if all(each.name not in uncounted for each in unit.trained) and not _are_shared(unit, sites):
        return [unit.gradient] if unit.count else []
    counted: list[Tensor] = []
    for each in (each for each in unit.trained if each.name not in uncounted):
        flat = each.gradient(unit.gradient).reshape(-1)
        found = _own_ranges(each, sites)
        counted += [flat] if found is None else [flat[start:stop] for start, stop in found]
    return [flat for flat in counted if flat.numel()]
