"""From gradients to new parameters: complete them, measure them, clip them, step, publish. Or skip, and say why."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from mizzen.accelerator import Fetch, get_accelerator
from mizzen.comm import collectives, groups
from mizzen.engine.stopping import Stopping
from mizzen.errors import UsageError
from mizzen.optim.rules import decided, decides, scaled
from mizzen.plan.parts import Store
from mizzen.precision.scaler import LossScaler

SQUARES, COUNT, LOSSES, STRANGERS = 0, 2, 3, 4
"""Places among the sums over all ranks."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What one rank adds up over the micro-batches of a step."""

    loss: Tensor | None = None
    """The sum of its losses, or of the numerators of `(sum, count)`."""
    count: Tensor | float = 0.0
    """The number of losses, or the sum of the counts."""
    is_counted: bool = False
    """Whether the losses came as `(sum, count)`, by whose count the gradient then still has to be divided."""

    def plus(self, loss: Tensor, count: Tensor | float, *, is_counted: bool = False) -> "Tally":
        """With one more micro-batch. Nothing here waits for the device."""
        loss = loss.detach().float()
        if self.loss is None:
            return Tally(loss, count, is_counted)
        if is_counted != self.is_counted:
            raise UsageError("some losses of this step came as (sum, count) and others as one number: return one kind")
        return Tally(self.loss + loss, self.count + count, is_counted)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an update did."""

    applied: bool
    norm: float
    loss: float | None
    reason: str = ""


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
        stopping: Stopping | None = None,
    ) -> None:
        self.stores = tuple(stores)
        self.optimizer = optimizer
        self.scaler = scaler
        self.group = group
        self.stopping = stopping or Stopping()
        self.max_norm = max_norm
        self.ranks = groups.get_world_size(group) if group is not None else 1
        self.goes_ahead = self.stores[0].device.type != "cpu"
        """Whether a step is launched before its norm is known here: what a CPU computes, it has computed."""
        self._is_free = False
        """Whether the gradients of the last step were stepped with as they were."""

    def update(self, tally: Tally, factor_of: Callable[[bool, bool], float]) -> Outcome:
        """Take the step, unless a gradient is not finite. One factor for all gradients.

        The loss scale is taken out, the mean over what was counted is taken, and the norm clipped.
        `factor_of(has_losses, has_strangers)` is given what any rank has seen, so that all get one answer or error.
        """
        for store in self.stores:
            store.gradients.collect()
        sums, guess = self._sum_over_ranks(tally), (tally.loss is not None, self._has_strangers())
        verdict = self._judge(sums, tally, _or_nan(factor_of, *guess))
        coming = Fetch(torch.cat([sums, torch.stack(verdict)]), get_accelerator())
        is_ahead = self.goes_ahead and decides(self.optimizer)
        if is_ahead:
            self._step_ahead(sums, guess, *verdict)
        sums = coming.read()
        _, loss, count, losses, strangers, requests, norm, factor = sums.tolist()
        self.stopping.agree(requests > 0)
        seen = (losses > 0, strangers > 0)
        share = factor_of(*seen)
        if guess != seen:
            norm, factor = (value.item() for value in self._judge(sums, tally, share))
        mean = loss / count if count else None
        if not math.isfinite(norm):
            reason = self._culprits()
            for store in self.stores:
                store.rest()
            self.clear()
            return Outcome(False, norm, mean, reason)
        is_taken = is_ahead and guess == seen and (factor == 1 or not self._is_free)
        self._is_free = factor == 1
        if not is_taken:
            with scaled(self.optimizer, factor, self.stores[0].device) as rest:
                self._step(rest)
        for store in self.stores:
            store.publish()
        self.clear()
        return Outcome(True, norm, mean)

    def _step_ahead(self, sums: Tensor, guess: tuple[bool, bool], norm: Tensor, factor: Tensor) -> None:
        """Launch the step before the host knows of its norm, so that the device has work while the host catches up.

        The device leaves it out where the norm is not finite, where the ranks have seen other things than this one, and
        where gradients turn out to need a factor that the last step did not: its kernel would write to all of them.
        """
        is_seen = sums[LOSSES : STRANGERS + 1] > 0
        is_off = ~norm.isfinite() | (is_seen[0] != guess[0]) | (is_seen[1] != guess[1])
        is_off = is_off | (factor != 1) if self._is_free else is_off
        with decided(self.optimizer, None if self._is_free else factor, is_off):
            self._step(1.0)

    def _step(self, factor: float) -> None:
        for store in self.stores:
            store.attach(factor)
        self.optimizer.step()

    def _judge(self, sums: Tensor, tally: Tally, share: float) -> tuple[Tensor, Tensor]:
        """The norm, rounded to fp32 once, and what gradients are to be multiplied with: where the sums are."""
        squares, count = sums[SQUARES], sums[COUNT]
        factor = torch.full_like(squares, share * self.stores[0].gain / self.scaler.scale)
        if tally.is_counted:
            factor = torch.where(count == 0, 0.0, factor * (self.ranks / count))
        norm = (squares.sqrt() * factor.abs()).float().to(squares)
        if self.max_norm > 0:  # torch's own rule
            factor = factor * (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm, factor

    def clear(self) -> None:
        """Forget all gradients."""
        self.scaler.has_scaled = False
        for store in self.stores:
            store.gradients.clear()

    def _sum_over_ranks(self, tally: Tally) -> Tensor:
        """Squares, losses, their count, who has losses or gradients from elsewhere, who is asked to stop: of all ranks.

        It is the one reduction of a step, and what its one wait is for. Numbers get to the device without a copy.
        """
        squares = torch.stack([store.squares() for store in self.stores]).sum()
        given = (tally.loss, tally.count, tally.loss is not None, self._has_strangers(), self.stopping.is_asked)
        values = [
            value.detach().to(squares) if isinstance(value, Tensor) else squares.new_full((), value or 0)
            for value in (squares, *given)
        ]
        sums = torch.stack(values)
        if self.group is not None:
            collectives.all_reduce(sums, group=self.group)
        return sums

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


def _or_nan(factor_of: Callable[[bool, bool], float], *seen: bool) -> float:
    """The answer for what this rank has seen; where there is none, the step is not taken by it."""
    try:
        return factor_of(*seen)
    except UsageError:
        return math.nan
