"""From gradients to new parameters: complete them, measure them, clip them, step, publish. Or skip, and say why."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from mizzen.accelerator import Fetch, get_accelerator
from mizzen.comm import collectives, groups
from mizzen.engine.changes import Changes
from mizzen.engine.stopping import Stopping
from mizzen.engine.vote import MANY_KINDS, Tally
from mizzen.errors import UsageError
from mizzen.optim.rules import decided, decides, scaled
from mizzen.plan.parts import Store
from mizzen.precision.scaler import LossScaler

SOME_SCALED: Final = (
    "some ranks called engine.scale(loss).backward() in this step and others a bare loss.backward(): use one of the two"
)

NO_GRADIENT: Final = (
    "no gradient arrived on any rank: the loss depends on no parameter that this engine trains, or its graph was cut "
    "(detach, no_grad, a call of another model)"
)

STEADY: Final = 8
"""Steps in a row without a factor after which the next is launched as if it had none: near the limit they alternate."""


class Sums(NamedTuple):
    """What is summed over all ranks: 0-d fp64 tensors on the device, then numbers."""

    squares: Any
    loss: Any
    count: Any
    losses: Any
    """Ranks that have seen a loss."""
    counted: Any
    """Ranks whose losses came as `(sum, count)`."""
    strangers: Any
    """Ranks that have gradients from a backward that nobody announced."""
    scaled: Any
    """Ranks whose losses were scaled, by `backward` or by the user."""
    requests: Any
    """Ranks that were asked to stop."""
    ahead: Any
    """Ranks that launch the step before they know of its norm."""
    changed: Any
    """Ranks on which parameters were moved or replaced, and have new values."""
    arrived: Any
    """Ranks on which at least one gradient arrived."""
    micros: Any
    """Micro-batches."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an update did."""

    applied: bool
    norm: float
    loss: float | None
    micros: float
    """Micro-batches of a rank, in the mean over the ranks."""
    reason: str = ""

    @property
    def has_overflowed(self) -> bool:
        """Whether gradients were not finite."""
        return not math.isfinite(self.norm)


class Updater:
    """The optimizer step over all stores of this rank."""

    def __init__(
        self,
        stores: Sequence[Store],
        optimizer: Optimizer,
        group: ProcessGroup | None,
        *,
        max_norm: float,
        scaler: LossScaler,
        changes: Changes,
        stopping: Stopping | None = None,
    ) -> None:
        self.stores = tuple(stores)
        self.optimizer = optimizer
        self.scaler = scaler
        self.group = group
        self.changes = changes
        self.stopping = stopping or Stopping()
        self.max_norm = max_norm
        self.ranks = groups.get_world_size(group) if group is not None else 1
        self.goes_ahead = self.stores[0].device.type != "cpu"
        """Whether a step is launched before its norm is known here: what a CPU computes, it has computed."""
        self._unclipped = 0
        """The last steps in a row whose gradients were stepped with as they were."""
        self._all_ahead = False
        """Whether every rank has launched the last step ahead."""

    def update(self, tally: Tally, micros: int, factor_of: Callable[[bool, bool, bool], float]) -> Outcome:
        """Take the step, unless a gradient is not finite or there is none at all. One factor for all gradients.

        The loss scale is taken out, the mean over what was counted is taken, and the norm clipped.
        `factor_of(has_losses, has_strangers, has_scaled)` is given what any rank has seen, so that all get one answer
        or error.
        """
        self.changes.before_step()
        for store in self.stores:
            store.gradients.collect()
        is_ahead = self.goes_ahead and decides(self.optimizer)
        sums = self._sum_over_ranks(tally, micros, is_ahead=is_ahead)
        share = _or_nan(factor_of, tally.loss is not None, self._has_strangers(), self.scaler.has_scaled)
        verdict = self._judge(sums, tally.is_counted, share)
        coming = Fetch(torch.stack([*sums, *verdict]), get_accelerator())
        if is_ahead:
            self._step_ahead(sums, *verdict)
        is_published = self._all_ahead  # a collective: what all ranks know of the last step decides, not what one does
        if is_published:
            self._publish()
        values = coming.read()
        *numbers, norm, factor = values.tolist()
        total = Sums(*numbers)
        self._all_ahead = total.ahead == self.ranks
        self.stopping.agree(total.requests > 0)
        self.changes.compare(total.changed, self.ranks)
        if 0 < total.counted < total.losses:
            raise UsageError(MANY_KINDS)
        share = factor_of(total.losses > 0, total.strangers > 0, total.scaled > 0)
        if 0 < total.scaled < total.strangers:
            raise UsageError(SOME_SCALED)
        is_right = not self._is_mixed(total)
        if not is_right:
            norm, factor = (value.item() for value in self._judge(Sums(*values[:-2]), total.counted > 0, share))
        mean, each = total.loss / total.count if total.count else None, total.micros / self.ranks
        reason = NO_GRADIENT if not total.arrived else "" if math.isfinite(norm) else self._culprits()
        if reason:
            for store in self.stores:
                store.rest()
            self.clear()
            return Outcome(False, norm, mean, each, reason)
        is_right = is_right and (factor == 1 or self._unclipped < STEADY)
        self._unclipped = self._unclipped + 1 if factor == 1 else 0
        if not (is_ahead and is_right):
            with scaled(self.optimizer, factor, self.stores[0].device) as rest:
                self._step(rest)
        if not (is_published and is_right and self._all_ahead):
            self._publish()
        self.clear(taken=True)
        return Outcome(True, norm, mean, each)

    def _step_ahead(self, sums: Sums, norm: Tensor, factor: Tensor) -> None:
        """Launch the step before the host knows of its norm, so that the device has work while the host catches up.

        The device leaves it out where the norm is not finite or no gradient came, where ranks have seen different
        things, and where gradients turn out to need a factor that the last ones did not: its kernel would write to all
        of them.
        """
        is_off = ~norm.isfinite() | (sums.arrived == 0) | self._is_mixed(sums)
        is_free = self._unclipped >= STEADY
        is_off = is_off | (factor != 1) if is_free else is_off
        with decided(self.optimizer, None if is_free else factor, is_off):
            self._step(1.0)

    def _is_mixed(self, sums: Sums) -> Any:
        """Whether some ranks have seen losses, a kind of them, or gradients from elsewhere, and others have not.

        So it is while there are new values in the model: they are compared first.
        """
        seen = (sums.losses, sums.counted, sums.strangers, sums.scaled)
        some, kind, strange, scaled = ((count > 0) & (count < self.ranks) for count in seen)
        return some | kind | strange | scaled | (sums.changed > 0)

    def _publish(self) -> None:
        for store in self.stores:
            store.publish()

    def _step(self, factor: float) -> None:
        for store in self.stores:
            store.attach(factor)
        self.optimizer.step()

    def _judge(self, sums: Sums, is_counted: bool, share: float) -> tuple[Tensor, Tensor]:
        """The norm, rounded to fp32 once, and what gradients are to be multiplied with: where the sums are."""
        squares = sums.squares
        factor = torch.full_like(squares, share * self.stores[0].gain / self.scaler.scale)
        if is_counted:
            factor = torch.where(sums.count == 0, 0.0, factor * (self.ranks / sums.count))
        norm = (squares.sqrt() * factor.abs()).float().to(squares)
        if self.max_norm > 0:  # torch's own rule
            factor = factor * (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm, factor

    def clear(self, *, taken: bool = False) -> None:
        """Forget all gradients; `taken` says that a step was taken with them."""
        self.scaler.has_scaled = False
        for store in self.stores:
            store.gradients.clear(taken=taken)

    def _sum_over_ranks(self, tally: Tally, micros: int, *, is_ahead: bool) -> Sums:
        """The one reduction of a step, and what its one wait is for. Numbers get to the device without a copy."""
        squares = torch.stack([store.squares() for store in self.stores]).sum()
        mine = Sums(
            squares=squares,
            loss=tally.loss,
            count=tally.count,
            losses=tally.loss is not None,
            counted=tally.is_counted,
            strangers=self._has_strangers(),
            scaled=self.scaler.has_scaled,
            requests=self.stopping.is_asked,
            ahead=is_ahead,
            changed=self.changes.has_new,
            arrived=any(store.gradients.has_arrived for store in self.stores),
            micros=micros,
        )
        values = [
            value.detach().to(squares) if isinstance(value, Tensor) else squares.new_full((), value or 0)
            for value in mine
        ]
        sums = torch.stack(values)
        if self.group is not None:
            collectives.all_reduce(sums, group=self.group)
        return Sums(*sums.unbind())

    def _has_strangers(self) -> bool:
        return any(store.gradients.has_strangers for store in self.stores)

    def _culprits(self) -> str:
        """Name every rank and parameter whose own gradient was not finite. All ranks come here together."""
        mine = sorted(name for store in self.stores for name in store.not_finite())
        named = [mine]
        if self.group is not None:
            gathered: list[list[str]] = [[] for _ in range(self.ranks)]
            collectives.all_gather_object(gathered, mine, group=self.group)
            named = gathered
        found = [
            f"rank {groups.get_global_rank(self.group, rank) if self.group else 0}: "
            + ", ".join(names[:3])
            + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            for rank, names in enumerate(named)
            if names
        ]
        if not found:
            return "the gradient norm is not finite although every rank's own gradients are: their sum overflows"
        return "gradient not finite on " + "; ".join(found)


def _or_nan(factor_of: Callable[[bool, bool, bool], float], *seen: bool) -> float:
    """The answer for what this rank has seen; where there is none, the step is not taken by it."""
    try:
        return factor_of(*seen)
    except UsageError:
        return math.nan
