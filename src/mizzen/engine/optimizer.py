"""The optimizer that users hold: a `torch.optim.Optimizer` whose groups and states are those of the real one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from mizzen.comm import collectives
from mizzen.errors import UsageError
from mizzen.model.box import Box
from mizzen.model.home import Site
from mizzen.offload.away import check_here
from mizzen.optim.guard import ParameterGuard
from mizzen.optim.own_rules import Lamb, Muon
from mizzen.optim.rules import has_stepped, renew_states
from mizzen.plan.parts import Store
from mizzen.precision.scaler import LossScaler
from mizzen.wording import and_more


class EngineOptimizer(Optimizer):
    """A face of the optimizer inside the engine. What is written to its groups, such as `lr`, reaches the real one.

    Its parameters are this rank's share of the master weights in flat pieces, not the model's parameters.
    """

    def __init__(
        self,
        inner: Optimizer,
        *,
        step: Callable[[], Any],
        clear: Callable[[], None],
        scaler: LossScaler,
        members: ParameterGuard,
        offload: Callable[..., None],
        reload: Callable[..., None],
    ) -> None:
        super().__init__([torch.zeros(0)], dict(inner.defaults))
        self.optimizer = inner
        self.param_groups = inner.param_groups
        self.state = inner.state
        self.overflow = False
        """Whether the last step was skipped: a gradient was not finite, or none arrived."""
        self.loss_scaler = scaler
        self._step = step
        self._clear = clear
        self._members = members
        self.offload_states = offload
        """The engine's own."""
        self.reload_states = reload

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """The engine's own step."""
        if closure is not None:
            raise UsageError("a closure cannot be given: the engine has already run forward and backward")
        self._step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: what is trained, and in which groups, is decided before the first step."""
        if "optimizer" not in vars(self):  # torch's own constructor asks, for the group that it is given
            super().add_param_group(param_group)
            return
        given = param_group.get("params", ())
        raise self._members.refusal([given] if isinstance(given, torch.Tensor) else list(given))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, whatever `set_to_none` says."""
        self._clear()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What `torch.amp.GradScaler.step` asks before it steps an optimizer: its scale is not the engine's."""
        raise UsageError(
            "GradScaler.step() with the optimizer of an engine, which scales losses itself: take the GradScaler away, "
            "or make it with enabled=False, set fp16.enabled in the configuration, and call engine.backward(loss) and "
            "engine.step()"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        """What `copy.deepcopy` calls."""
        raise UsageError(
            "the optimizer of an engine cannot be copied or pickled: take its state_dict(), or save with "
            "engine.save_checkpoint()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What `torch.save` and `pickle` call."""
        return self.__deepcopy__(None)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's share, and where the loss scale stands."""
        self._check_here()
        return self.optimizer.state_dict() | {"loss_scaler": self.loss_scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave on the same rank of the same layout."""
        self._check_here()
        self.optimizer.load_state_dict(state_dict)
        if "loss_scaler" in state_dict:
            self.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state

    def _check_here(self) -> None:
        for tensor in (value for state in self.state.values() for value in state.values() if isinstance(value, Tensor)):
            check_here(tensor, "the state of the optimizer")

    @property
    def loss_scale(self) -> float:
        """The factor that losses are multiplied with before backward."""
        return self.loss_scaler.scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether that factor moves by itself."""
        return self.loss_scaler.settings.is_dynamic

    def override_loss_scale(self, loss_scale: float) -> None:
        """Fix the factor from here on. It cannot change between a backward and its step."""
        self.loss_scaler.override(loss_scale)

    @property
    def cur_scale(self) -> float:
        """The loss scale, under its other name."""
        return self.loss_scale


def use_masters(optimizer: Optimizer, stores: Sequence[Store]) -> None:
    """Make an optimizer work on the master weights of stores instead of the parameters it was built with.

    States that it already had are refused: they belong to whole parameters, and a checkpoint is the way to carry them
    over. A rule that needs the norms of parameters learns which ranges of the masters belong to which.
    """
    if has_stepped(optimizer):
        names = {id(parameter): name for store in stores for name, parameter in store.contents.trained.items()}
        known = [names.get(id(parameter), "?") for parameter in optimizer.state]
        raise UsageError(
            f"the optimizer already has states, for {and_more(known, 3)}: give "
            "`initialize` an optimizer that has not stepped yet, and load its states from a checkpoint"
        )
    masters = [master for store in stores for master in store.contents.masters]
    for number, settings in enumerate(optimizer.param_groups):
        settings["params"] = [master for index, master in masters if index == number]
    renew_states(optimizer)
    if isinstance(optimizer, Lamb):
        rows, add_up = _by_holders(stores)
        optimizer.share(
            {tensor: ranges for store in stores for tensor, ranges in store.contents.portions.items()},
            rows,
            add_up,
            next(parameter.device for store in stores for parameter in store.contents.trained.values()),
        )
    if isinstance(optimizer, Muon):
        optimizer.joined = dict(_cut_matrices(optimizer, stores))


def _cut_matrices(optimizer: Muon, stores: Sequence[Store]) -> Iterator[tuple[Tensor, "CutMatrix"]]:
    """What is stepped of matrices that are cut over tensor-parallel ranks, which all step them in one order."""
    matrices = {id(each) for group in optimizer.param_groups if group["use_muon"] for each in group["params"]}
    for store in stores:
        for tensor, portions in store.contents.portions.items():
            site = store.contents.sites.get(portions[0].name) if id(tensor) in matrices else None
            if site is not None and site.cut_axes:
                (axis,) = site.cut_axes
                yield tensor, CutMatrix(site, store.ranks.cut_groups[axis])


@dataclass(frozen=True, slots=True)
class CutMatrix:
    """A matrix of which the ranks of one axis hold parts of one shape, some perhaps the same."""

    site: Site
    group: ProcessGroup

    def join(self, part: Tensor) -> Tensor:
        """The whole, from the parts of all ranks; all of them call this."""
        ranks = self.site.layout.ranks_along(self.site.cut_axes, self.site.rank)
        every = part.new_empty((len(ranks), *part.shape))
        collectives.all_gather_into_tensor(every.view(-1), part.reshape(-1), group=self.group)
        whole = part.new_empty(self.site.shape)
        for rank, own in zip(ranks, every, strict=True):
            for box, place in replace(self.site, rank=rank).parts:
                whole[_slices(box)] = own[_slices(place)]
        return whole

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole."""
        return self.site.part_of(whole)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))


def _by_holders(stores: Sequence[Store]) -> tuple[list[str], Callable[[Tensor], None]]:
    """The names of all parameters, and what sums a row for each of them over the ranks that hold the rest of it.

    Where some of these hold the same, all sums of a row grow alike.
    """
    held: dict[tuple[ProcessGroup, ...], list[str]] = {}
    for store in stores:
        for name in store.contents.trained:
            site = store.contents.sites.get(name)
            others = [store.ranks.cut_groups[axis] for axis in (site.cut_axes if site is not None else ())]
            is_sharded = store.ranks.shard_group is not None
            sharers = [store.ranks.reduce_group] if store.ranks.reduce_group is not None and is_sharded else []
            held.setdefault((*sharers, *others), []).append(name)

    def add_up(squares: Tensor) -> None:
        start = 0
        for holders, names in held.items():
            for group in holders:
                collectives.all_reduce(squares[start : start + len(names)], group=group)
            start += len(names)

    return [name for names in held.values() for name in names], add_up
