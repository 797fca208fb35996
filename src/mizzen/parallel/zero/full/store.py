"""The sharded parameters of one part. What the engine asks of it is `plan.parts.Store`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mizzen.comm import collectives, groups
from mizzen.kernels.norm import sum_of_squares
from mizzen.model.piece import Piece
from mizzen.model.placement import boxes_of_dtensor, piece_of_tensor
from mizzen.parallel.zero.full.gradients import UnitGradients
from mizzen.parallel.zero.full.live import LiveUnit, Share, Trained, local, up
from mizzen.parallel.zero.full.sharded import bring_back, mark, move, set_aside, unmark
from mizzen.parallel.zero.full.touch import Touch
from mizzen.parallel.zero.full.units import Unit, is_trained
from mizzen.parallel.zero.full.wires import Gather, Place, Scatter
from mizzen.parallel.zero.full.wrap import (
    Wrapping,
    connect,
    forget,
    held_open,
    padded,
    recover,
    rehouse,
    sharded,
    start,
    unwrap,
    whole,
    wrap,
)
from mizzen.parallel.zero.reduce import Reducer, Reduction, torch_dtype
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


class FullStore:
    """The units of one model."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], holding: FullHolding, ranks: Ranks) -> None:
        self.holding = holding
        self.group = ranks.everyone
        self.sharers = ranks.sharers
        self.counts = ranks.copies is None or groups.get_rank(ranks.copies) == 0
        """Whether this rank's shards count in a norm, of which each is counted once."""
        self.model: Any = model
        self.place = Place()
        self.replaced: list[tuple[Tensor, str]] = []
        """Objects by which a user may know a parameter, beside the sharded one, with its name."""
        modules = dict(model.named_modules())
        for unit in units:
            self._wrap(unit, modules[unit.path], ranks)
        self.units = tuple(self._live(unit, modules[unit.path]) for unit in units)
        reducer = Reducer(holding.reduction, ranks.sharers)
        copies = Reducer(holding.between, ranks.copies)
        self.gradients = UnitGradients(self.units, reducer, copies, ranks.everyone, self.place)
        self._connect()

    def _wrap(self, unit: Unit, module: nn.Module, ranks: Ranks) -> None:
        """Give a unit's parameters the first rank's values and the dtype of their masters, and shard them."""
        own = dict(self.model.named_parameters())
        wanted = {each.name: own[each.name] for each in unit.parameters}
        device = torch.device(ranks.mesh.device_type)
        for each in unit.parameters:
            parameter, is_master = wanted[each.name], is_trained(each) and unit.master is not None
            dtype = torch_dtype(unit.master) if is_master and unit.master else parameter.dtype
            parameter.data = parameter.data.to(device, dtype, non_blocking=True).contiguous()
            collectives.broadcast(parameter.data, group=ranks.everyone, group_src=0)
        wrap(unit, module, list(wanted.values()), ranks.mesh, self.holding.wrapping)
        for name, parameter in wanted.items():
            move(parameter, name)
            self.replaced.append((parameter, name))

    def _live(self, unit: Unit, module: nn.Module) -> LiveUnit:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
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
            if is_trained(facts[name]):
                group = facts[name].group or 0
                offset = sizes.get(group, 0)
                trained.setdefault(group, []).append(Trained(name, parameter, place, length, offset))
                sizes[group] = offset + length
                place += length
        device = next((local(each).device for each in found.values()), torch.device("cpu"))
        dtype = torch_dtype(wider(self.holding.policy.accumulation, unit.held)) if unit.held else torch.float32
        sums = torch.zeros(up(place), dtype=dtype, device=device)
        count = sum(map(len, trained.values()))
        return LiveUnit(
            plan=unit,
            module=module,
            parameters=found,
            shares=tuple(self._share(unit, module, group, each) for group, each in trained.items()),
            sums=sums,
            gradient=sums[:place],
            finite=torch.ones(count, dtype=torch.bool, device=device),
        )

    def _share(self, unit: Unit, module: nn.Module, group: int, trained: Sequence[Trained]) -> Share:
        """Move the shards of a group into one tensor."""
        first = local(trained[0].parameter)
        master = first.new_zeros(up(trained[-1].offset + trained[-1].length))
        for each in trained:
            rehouse(module, each.parameter, master[each.offset : each.offset + each.length])
        states = wider(self.holding.policy.states, unit.master or "float32")
        return Share(group, tuple(trained), master, master.to(torch_dtype(states)))

    def _connect(self) -> None:
        for unit in self.units:
            gather = Gather(unit.plan.title, self.place)
            scatter = Scatter(unit.plan.title, self.place, partial(self.gradients.take, unit))
            unit.handles += connect(unit.module, gather, scatter)
        root, *others = self.units
        device_type = str(self.device.type)
        modules, sizes = [unit.module for unit in others], [unit.plan.numel for unit in others]
        start(root.module, modules, sizes, self.holding.wrapping, device_type)
        root.handles += [
            root.module.register_forward_pre_hook(self._enter, prepend=True),
            root.module.register_forward_hook(self._leave, always_call=True),
        ]
        for unit in self.units:
            with torch.no_grad(), held_open(unit.module):
                for name, parameter in zip(unit.parameters, whole(unit.module), strict=True):
                    self.replaced.append((parameter, name))
            slots = {each.name: each for each in unit.trained}
            for name, parameter in unit.parameters.items():
                mark(parameter, name, Touch(unit, slots.get(name), self.gradients, self.sharers))
            for each in unit.trained:
                hook = each.parameter.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
                unit.handles.append(hook)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.place.calls += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.place.calls = max(0, self.place.calls - 1)
        if not torch.is_grad_enabled() and not self.place.calls and not self.units[0].open:
            self.model.reshard()  # nothing of it is needed in a backward

    @property
    def device(self) -> torch.device:
        """Where the shards are."""
        return self.units[0].gradient.device

    @property
    def parameters(self) -> dict[str, Any]:
        """The trained parameters by name: their sharded objects."""
        return {each.name: each.parameter for unit in self.units for each in unit.trained}

    @property
    def everything(self) -> dict[str, Any]:
        """All sharded parameters by name, the frozen ones too."""
        return {name: parameter for unit in self.units for name, parameter in unit.parameters.items()}

    @property
    def is_sharded(self) -> bool:
        """Always."""
        return True

    @property
    def gain(self) -> float:
        """What the mean gradient is to be multiplied with before a step."""
        return self.holding.gain

    # What the optimizer works on

    @property
    def shares(self) -> Iterator[Share]:
        """What the optimizer steps, unit by unit."""
        return (share for unit in self.units for share in unit.shares)

    def masters(self) -> list[tuple[int, Tensor]]:
        """(optimizer group, what the optimizer steps) for every share."""
        return [(share.group, share.stepped) for share in self.shares]

    def attach(self, factor: float = 1.0) -> None:
        """Give what the optimizer steps its value, and its gradient times a factor, in its own dtype."""
        for unit in self.units:
            for share in unit.shares:
                if share.stepped is not share.master:
                    share.stepped.data = share.master.to(share.stepped.dtype)
                gradient = share.gradient(unit.sums).to(share.stepped.dtype)
                share.stepped.grad = gradient if factor == 1 else gradient.mul_(factor)

    def rest(self) -> None:
        """Let go of what only a step needs."""
        for share in self.shares:
            share.stepped.grad = None
            if share.stepped is not share.master:
                share.stepped.data = share.stepped.new_empty(0)

    def squares(self) -> Tensor:
        """The fp64 sum of squares of the gradients that this rank counts."""
        return sum_of_squares((unit.gradient for unit in self.units if self.counts), device=self.device)

    def publish(self) -> None:
        """The shards are the masters, so nothing moves; what was gathered of the old values is let go."""
        for share in self.shares:
            if share.stepped is not share.master:
                share.master.copy_(share.stepped)
        self.rest()
        self.refresh()
        self.place.step += 1

    def refresh(self) -> None:
        """Somebody has written to the shards: forget what was gathered of them."""
        for unit in self.units:
            if not unit.open:
                forget(unit.module)

    def follow(self, name: str, value: Tensor) -> None:
        """A master was written to, which is the parameter itself."""
        self.refresh()

    def not_finite(self) -> list[str]:
        """The parameters whose gradient on this rank was not finite before it was summed."""
        return [
            each.name
            for unit in self.units
            for each, is_finite in zip(unit.trained, unit.finite.tolist(), strict=True)
            if not is_finite
        ]

    # The same by name

    def pieces(self, of: Literal["master", "gradient"]) -> list[Piece]:
        """What this rank holds, by parameter name; masters of frozen parameters are these themselves."""
        if of == "master":
            return [piece_of_tensor(name, _plain(parameter)) for name, parameter in self.everything.items()]
        return [_piece(each, each.gradient(unit.gradient)) for unit in self.units for each in unit.trained]

    def state_pieces(self, states: Mapping[Tensor, Mapping[str, object]], key: str) -> list[Piece]:
        """An optimizer state by parameter name; states that are not as large as what they belong to are left out."""
        found = []
        for share in self.shares:
            state = states.get(share.stepped, {}).get(key)
            if isinstance(state, Tensor) and state.shape == share.master.shape:
                found += [_piece(each, each.master(state)) for each in share.trained]
        return found

    @contextmanager
    def whole(self, names: Iterable[str]) -> Iterator[Mapping[str, Tensor]]:
        """The units of some parameters gathered; what stands in the modules then, by name."""
        wanted = set(names)
        units = [unit for unit in self.units if wanted.intersection(unit.parameters)]
        with ExitStack() as stack:
            for unit in units:
                stack.enter_context(self._opened(unit))
            yield {
                name: parameter
                for unit in units
                for name, parameter in zip(unit.parameters, whole(unit.module), strict=True)
                if name in wanted
            }

    @contextmanager
    def _opened(self, unit: LiveUnit) -> Iterator[None]:
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
            finally:
                unit.open = 0
                for parameter in unit.parameters.values():
                    bring_back(parameter)

    def abandon(self) -> None:
        """Start again after a forward or backward that failed half-way."""
        self.place.calls = 0
        recover(self.model)
        self.gradients.clear()

    def detach(self) -> None:
        """Give the module its parameters back, whole, on every rank; all ranks do this together."""
        for unit in reversed(self.units):
            for handle in unit.handles:
                handle.remove()
            plain = {name: _gathered(parameter) for name, parameter in unit.parameters.items()}
            names = {id(parameter): name for name, parameter in unit.parameters.items()}
            unwrap(unit.module, _replacement(unit, plain, names))
        self.units = self.gradients.units = ()
        self.replaced.clear()


def _replacement(
    unit: LiveUnit, plain: Mapping[str, Tensor], names: Mapping[int, str]
) -> Callable[[Tensor], nn.Parameter]:
    def replace(parameter: Tensor) -> nn.Parameter:
        value = plain[names[id(parameter)]]
        held = torch_dtype(unit.plan.held) if unit.plan.held and parameter.requires_grad else value.dtype
        return nn.Parameter(value.to(held), requires_grad=parameter.requires_grad)

    return replace


def _drop(parameter: Tensor) -> None:
    """What torch leaves as a gradient is not where ours are."""
    parameter.grad = None


def _plain(parameter: DTensor) -> Tensor:
    """The same shard without our class, which answers for itself."""
    with torch._C.DisableTorchFunctionSubclass():
        found: Tensor = parameter.detach()
    return found


def _gathered(parameter: DTensor) -> Tensor:
    unmark(parameter)
    with torch.no_grad():
        return parameter.full_tensor().clone()


def _piece(each: Trained, data: Tensor) -> Piece:
    return Piece(each.name, tuple(each.parameter.shape), boxes_of_dtensor(each.parameter), data)
