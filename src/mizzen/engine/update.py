"""From gradients to new parameters: complete them, measure them, clip them, step, publish. Or skip, and say why."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from mizzen.comm import collectives, groups
from mizzen.engine.stopping import Stopping
from mizzen.errors import UsageError
from mizzen.optim.rules import scaled
from mizzen.plan.parts import Store
from mizzen.precision.scaler import LossScaler


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

    def update(self, tally: Tally, factor_of: Callable[[bool, bool], float]) -> Outcome:
        """Take the step, unless a gradient is not finite. One factor for all gradients.

        The loss scale is taken out, the mean over what was counted is taken, and the norm clipped.
        `factor_of(has_losses, has_strangers)` is given what any rank has seen, so that all get one answer or error.
        """
        for store in self.stores:
            store.gradients.collect()
        squares, loss, count, losses, strangers, requests = self._sum_over_ranks(tally)
        self.stopping.agree(requests > 0)
        factor = factor_of(losses > 0, strangers > 0) * self.stores[0].gain / self.scaler.scale
        if tally.is_counted:
            factor *= self.ranks / count if count else 0.0
        norm = _rounded(math.sqrt(squares) * abs(factor)) if squares >= 0 else math.nan
        mean = loss / count if count else None
        if not math.isfinite(norm):
            reason = self._culprits()
            self.clear()
            return Outcome(False, norm, mean, reason)
        factor *= _clip_factor(norm, self.max_norm)
        with scaled(self.optimizer, factor, self.stores[0].device) as rest:
            for store in self.stores:
                store.attach(rest)
            self.optimizer.step()
        for store in self.stores:
            store.publish()
        self.clear()
        return Outcome(True, norm, mean)

    def clear(self) -> None:
        """Forget all gradients."""
        self.scaler.has_scaled = False
        for store in self.stores:
            store.gradients.clear()

    def _sum_over_ranks(self, tally: Tally) -> list[float]:
        """Squares, losses, their count, who has losses or gradients from elsewhere, who is asked to stop: of all ranks.

        It is the one reduction of a step, and its one wait for the device: numbers get there without a copy.
        """
        squares = torch.stack([store.squares() for store in self.stores]).sum()
        has_strangers = any(store.gradients.has_strangers for store in self.stores)
        values = (squares, tally.loss, tally.count, tally.loss is not None, has_strangers, self.stopping.is_asked)
        sums = torch.stack(
            [
                value.detach().to(squares) if isinstance(value, Tensor) else squares.new_full((), value or 0)
                for value in values
            ]
        )
        if self.group is not None:
            collectives.all_reduce(sums, group=self.group)
        total: list[float] = sums.tolist()
        return total

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


def _clip_factor(norm: float, max_norm: float) -> float:
    """torch's own rule: max_norm / (norm + 1e-6), never above 1; a max_norm of 0 is no limit."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


def _rounded(value: float) -> float:
    """To fp32, once."""
    return torch.tensor(value, dtype=torch.float32).item()
