"""The sharded parameters of one part. What the engine asks of it is `plan.parts.Store`."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from mizzen.comm import groups
from mizzen.comm.communicator import take_parted
from mizzen.comm.tags import Tag
from mizzen.errors import CommError, UsageError
from mizzen.kernels.norm import sum_of_squares
from mizzen.model.home import Site
from mizzen.model.piece import Piece, piece_of_boxes
from mizzen.model.placement import boxes_of_dtensor, piece_of_tensor
from mizzen.optim.lamb import Portion
from mizzen.parallel.zero.full.assemble import FullHolding, Ranks, assemble
from mizzen.parallel.zero.full.backward import Backward
from mizzen.parallel.zero.full.frozen import Packed
from mizzen.parallel.zero.full.gradients import UnitGradients
from mizzen.parallel.zero.full.live import LiveUnit, Share, ShareLot, Trained, gather_shards, local
from mizzen.parallel.zero.full.quantized import QuantizedGather, QuantizedReducer
from mizzen.parallel.zero.full.sharded import (
    bring_back,
    carry,
    carry_hooks,
    mark,
    move,
    set_aside,
    unmark,
    write_shard,
)
from mizzen.parallel.zero.full.touch import Touch
from mizzen.parallel.zero.full.units import Unit, shard_dim
from mizzen.parallel.zero.full.whole import Wholes
from mizzen.parallel.zero.full.wires import Gather, Place, Scatter, explained
from mizzen.parallel.zero.full.wrap import (
    Wires,
    connect,
    end_backward,
    forget,
    held_open,
    put_right,
    recover,
    start,
    unwrap,
    whole,
)
from mizzen.parallel.zero.reduce import Reducer, torch_dtype
from mizzen.parallel.zero.stock import Stock
from mizzen.parallel.zero.store import part_for
from mizzen.plan.parts import ReducedGradients, StoreContents, StoreRanks, StoreStatus


class FullStore:
    """The units of one model."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        holding: FullHolding,
        ranks: Ranks,
        sites: Mapping[str, Site] | None = None,
        uncounted: Collection[str] = (),
        others: Mapping[str, ProcessGroup] | None = None,
    ) -> None:
        self.holding = holding
        self.sites = sites or {}
        self.uncounted = frozenset(uncounted)
        """Parameters that ranks elsewhere count, because they hold the same."""
        self.sharing = ranks.sharers
        self.counts = ranks.copies is None or groups.get_rank(ranks.copies) == 0
        """Whether this rank's shards count in a norm, of which each is counted once."""
        self.ranks = StoreRanks(
            reduce_group=ranks.everyone,
            shard_group=ranks.sharers,
            replica_group=ranks.copies,
            cut_groups=others or {},
            step_factor=holding.gain,
        )
        self.model: Any = model
        self.place = Place()
        self.parted: Tensor | None = None
        """On a device: whether the tags of some collective of this step have differed."""
        self.stock = Stock(torch.device(ranks.mesh.device_type))
        self.units, moved = assemble(model, units, holding, ranks, self.stock)
        self.device = self.units[0].device
        reducer = Reducer(holding.reduction, ranks.sharers, self.stock)
        if holding.quantizing.gradients:
            reducer = QuantizedReducer(
                holding.reduction, ranks.sharers, self.stock, holding.quantizing, lambda: self.place.step
            )
        copies = Reducer(holding.between, ranks.copies, self.stock)
        self.wholes = Wholes(self.units, holding.owners, ranks.sharers)
        lots = [ShareLot(unit, share) for unit in self.units for share in unit.shares if not share.is_whole]
        self.shares: Sequence[Share] = tuple(lot.share for lot in lots)
        """What the optimizer steps as it lies here, unit by unit."""
        self.backward = Backward(partial(end_backward, model))
        self.gradients = UnitGradients(self.units, reducer, copies, ranks.everyone, self.place, self.backward)
        trained: dict[str, Any] = {each.name: each.parameter for unit in self.units for each in unit.trained}
        self.contents = StoreContents(
            trained=trained,
            held={name: parameter for unit in self.units for name, parameter in unit.parameters.items()},
            units=[tuple(unit.parameters) for unit in self.units],
            other_objects=[*moved, *self._connect()],
            sites=self.sites,
            saved_elsewhere=self.uncounted,
            lots=(*lots, *self.wholes.rounds),
            masters=[(share.group, share.stepped) for share in self.shares] + self.wholes.masters(),
            portions={share.stepped: _portions(share) for share in self.shares} | self.wholes.portions(),
        )

    def _connect(self) -> list[tuple[Tensor, str]]:
        """Let torch call us for every unit; the parameters that stand in modules while these are whole, by name."""
        found: list[tuple[Tensor, str]] = []
        for unit in self.units:
            kind = QuantizedGather if self.holding.quantizing.weights else Gather
            gather = kind(unit.plan.title, self.place)
            scatter = Scatter(unit.plan.title, self.place, partial(self.gradients.take, unit))
            see, check = partial(self.gradients.see, unit), partial(_check_alone, unit, self.place)
            connect(unit.module, Wires(gather, scatter, see, check, self.backward))
        root, *others = self.units
        device_type = str(self.device.type)
        modules, sizes = [unit.module for unit in others], [unit.plan.numel for unit in others]
        start(root.module, modules, sizes, self.holding.wrapping, device_type)
        root.handles += [
            root.module.register_forward_pre_hook(self._enter, prepend=True),
            root.module.register_forward_hook(self._leave, always_call=True),
            root.module.register_state_dict_pre_hook(self._forget),
            root.module.register_load_state_dict_pre_hook(self._forget),
            root.module.register_load_state_dict_post_hook(lambda *_: self.restore_parameters({})),
        ]
        root.handles += _entrances(self.units, self._enter, self._leave)
        for unit in self.units:
            with torch.no_grad(), held_open(unit.module):
                stand_ins = dict(zip(unit.parameters, whole(unit.module), strict=True))
            slots = {each.name: each for each in unit.trained}
            for each in unit.trained:
                carry_hooks(each.parameter, stand_ins[each.name])
                hook = each.parameter.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
                dense = stand_ins[each.name].register_post_accumulate_grad_hook(_dense)  # type: ignore[no-untyped-call]
                unit.handles += [hook, dense]
                self.backward.parameters[each.name] = stand_ins[each.name]
            for name, parameter in unit.parameters.items():
                found.append((stand_ins[name], name))
                mark(parameter, name, Touch(unit, slots.get(name), self.gradients, self.sharing), stand_ins[name])
        return found

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self.place.calls and not self.place.is_backward and recover(self.model):
            self.gradients.clear()  # what an exception has left is not half of a gradient
        if not self.place.calls:
            _check_places(self.units)
        self.place.__enter__()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.place.__exit__()
        if not torch.is_grad_enabled() and not self.place.calls and not self.units[0].open:
            self.model.reshard()  # nothing of it is needed in a backward

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
            if self.uncounted.isdisjoint(each.name for each in unit.trained):
                counted.append(unit.gradient)
            else:
                mine = (each for each in unit.trained if each.name not in self.uncounted)
                counted += [each.gradient(unit.gradient).reshape(-1) for each in mine]
        found = sum_of_squares(counted, device=self.device)
        self.parted = take_parted()
        return found if self.parted is None else torch.where(self.parted, torch.nan, found)

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
        """The shards are the masters, so nothing moves; what was gathered of the old values is let go."""
        for lot in self.contents.lots:
            lot.write_back()
            lot.rest()
        self._forget()

    def restore_parameters(self, replaced: Mapping[str, Tensor] | None = None) -> None:
        """Forget what was gathered of shards that somebody has written to, and put them back in their modules.

        Sharded parameters are never moved. What came with another module, or by an assignment, is not sharded.
        """
        if replaced is None:
            return
        self._forget()
        _check_places(unit for unit in self.units if not unit.open)
        for name in replaced:
            raise UsageError(
                f"'{name}' was replaced in the model, with its module or by an assignment, and nobody would train what "
                "came: put the module back and copy values into what GatheredParameters(..., modifier_rank=0) has "
                "gathered, or make a new engine of engine.module"
            )

    def _forget(self, *_: Any) -> None:
        """Shard again whatever is gathered without need."""
        for unit in self.units:
            if not unit.open:
                forget(unit.module)

    def update_copies(self, of: str, name: str, value: Callable[[], Tensor]) -> None:
        """A master has copies where it rests in another form or is gathered; a gradient has none."""
        if of == "gradient":
            return
        parameter = self.contents.held[name]
        whole_value = part_for(parameter, value(), self.sites.get(name))
        for unit in self.units:
            if unit.open and name in unit.parameters:
                with torch.no_grad():
                    whole(unit.module)[list(unit.parameters).index(name)].copy_(whole_value)
        if isinstance(parameter, DTensor) and isinstance(local(parameter), Packed):
            write_shard(parameter, whole_value)
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
                    found += [_piece(each, each.master(state)) for each in share.trained]
            found += self.wholes.state_pieces(states, of)
        elif of == "master":
            found = [piece_of_tensor(name, _plain(parameter)) for name, parameter in self.contents.held.items()]
        else:
            found = [_piece(each, each.gradient(unit.gradient)) for unit in self.units for each in unit.trained]
        return [self._in_whole(piece) for piece in found]

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
                stack.enter_context(_opened(unit))
            yield {
                name: parameter
                for unit in units
                for name, parameter in zip(unit.parameters, whole(unit.module), strict=True)
                if name in wanted
            }

    def release(self) -> None:
        """Give the module its parameters back, whole, on every rank; all ranks do this together."""
        if any(unit.open for unit in self.units):
            raise UsageError("destroy() or another initialize() inside GatheredParameters: leave the context first")
        for unit in reversed(self.units):
            for handle in unit.handles:
                handle.remove()
            plain = {
                name: _gathered(parameter, self.sharing, Tag(self.place.step, name, "giving back"))
                for name, parameter in unit.parameters.items()
            }
            names = {id(parameter): name for name, parameter in unit.parameters.items()}
            unwrap(unit.module, _replacement(unit, plain, names))
            for name, parameter in unit.parameters.items():
                move(parameter, name, "its engine gave it back")
        self.units = self.gradients.units = self.shares = self.wholes.rounds = ()
        self.backward.parameters.clear()
        self.contents = StoreContents()
        self.stock.clear()


@contextmanager
def _opened(unit: LiveUnit) -> Iterator[None]:
    if unit.open:
        unit.open += 1
        try:
            yield
        finally:
            unit.open -= 1
        return
    with held_open(unit.module):
        unit.open = 1
        for parameter in unit.parameters.values():
            set_aside(parameter)
        try:
            yield
            _check_places([unit])
        finally:
            unit.open = 0
            for parameter in unit.parameters.values():
                bring_back(parameter)


def _portions(share: Share) -> list[Portion]:
    return [Portion(each.name, each.offset, each.offset + local(each.parameter).numel()) for each in share.trained]


def _check_alone(unit: LiveUnit, place: Place) -> None:
    """A unit that runs by itself has not been looked at when its model was entered."""
    if not place.calls:
        _check_places([unit])


def _check_places(units: Iterable[LiveUnit]) -> None:
    places = [place for unit in units for place in zip(unit.parameters, put_right(unit.module), strict=True)]
    if wrong := [name for name, is_there in places if not is_there]:
        raise UsageError(
            f"'{wrong[0]}' was replaced in the model, by load_state_dict with assign=True, functional_call or an "
            "assignment, and nobody would train what came: the sharded parameter is there again. Copy values instead, "
            "with load_state_dict alone, or into what GatheredParameters(..., modifier_rank=0) has gathered"
        )


def _replacement(
    unit: LiveUnit, plain: Mapping[str, Tensor], names: Mapping[int, str]
) -> Callable[[Tensor], nn.Parameter]:
    def replace(parameter: Tensor) -> nn.Parameter:
        value = plain[names[id(parameter)]]
        held = torch_dtype(unit.plan.held) if unit.plan.held and parameter.requires_grad else value.dtype
        found = nn.Parameter(value.to(held), requires_grad=parameter.requires_grad)
        carry(parameter, found)
        return found

    return replace


def _dense(parameter: Tensor) -> None:
    """What an embedding may give as a sparse gradient cannot be sharded."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()


def _entrances(
    units: Sequence[LiveUnit], enter: Callable[..., None], leave: Callable[..., None]
) -> list[RemovableHandle]:
    """In evaluation a part of the model may be called on its own, as an encoder is before generation."""
    root, *others = units
    inside = {id(module) for unit in others for module in unit.module.modules()}
    parts = [module for module in root.module.modules() if module is not root.module and id(module) not in inside]
    return [
        handle
        for part in parts
        for handle in (
            part.register_forward_pre_hook(_evaluating(enter), prepend=True),
            part.register_forward_hook(_evaluating(leave), always_call=True),
        )
    ]


def _evaluating(hook: Callable[..., None]) -> Callable[..., None]:
    """The same while nothing is differentiated."""
    return lambda *args: None if torch.is_grad_enabled() else hook(*args)


def _drop(parameter: Tensor) -> None:
    """What torch leaves as a gradient is not where ours are."""
    parameter.grad = None


def _plain(parameter: Tensor) -> Tensor:
    """The same shard without our class, which answers for itself."""
    with torch._C.DisableTorchFunctionSubclass():
        found: Tensor = parameter.detach()
    return found


def _gathered(parameter: DTensor, group: ProcessGroup, tag: Tag) -> Tensor:
    unmark(parameter)
    dim = shard_dim(parameter.shape, groups.get_world_size(group))
    return gather_shards(local(parameter), parameter.shape, dim, group, tag=tag)


def _piece(each: Trained, data: Tensor) -> Piece:
    return Piece(each.name, tuple(each.parameter.shape), boxes_of_dtensor(each.parameter), data)
