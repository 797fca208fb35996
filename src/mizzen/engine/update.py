"""From gradients to new parameters: complete them, let all ranks vote, step, write back. Or skip, and say why."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mizzen.engine.model_changes import ModelChanges
from mizzen.engine.offloaded_step import OffloadedStep
from mizzen.engine.stopping import Stopping
from mizzen.engine.vote import NOT_FINITE, Decision, PendingDecision, ShareOf, StepSums, Vote
from mizzen.errors import UsageError
from mizzen.optim.rules import decided, decides, only, scaled, why_not_apart
from mizzen.plan.losses import Tally
from mizzen.plan.parts import Lot, ReducedGradients, Store
from mizzen.precision.scaler import LossScaler

STEADY: Final = 8
"""Steps in a row without a factor after which the next is launched as if it had none: near the limit they alternate."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """What was done of a step before the host knew of its norm, so that the device has work while it catches up."""

    is_stepped: bool
    is_published: bool
    is_free: bool
    """Whether gradients were taken to need no factor."""

    def is_confirmed(self, decision: Decision) -> bool:
        """Whether what was launched is the step that was decided on. Every rank has the same answer."""
        return decision.is_foreseen and (decision.factor == 1 or not self.is_free)


class Updater:
    """The optimizer step over all stores of this rank."""

    def __init__(
        self,
        stores: Sequence[Store],
        optimizer: Optimizer,
        vote: Vote,
        *,
        max_norm: float,
        scaler: LossScaler,
        changes: ModelChanges,
        stopping: Stopping | None = None,
        one_by_one: bool = False,
    ) -> None:
        self.stores = tuple(stores)
        self.optimizer = optimizer
        self.vote = vote
        self.scaler = scaler
        self.changes = changes
        self.stopping = stopping or Stopping()
        self.max_norm = max_norm
        self.one_by_one = one_by_one
        """Whether one lot after the other is loaded, stepped and written back: the same bits in less memory."""
        self.offloaded: OffloadedStep | None = None
        """What steps the lots where some of them rest outside the device."""
        self.goes_ahead = vote.device.type != "cpu"
        """Whether a step is launched before its norm is known here: what a CPU computes, it has computed."""
        self._unclipped = 0
        """The last steps in a row whose gradients were stepped with as they were."""
        self._all_ahead = False
        """Whether every rank has launched the last step ahead."""

    def expected_factor(self) -> float | None:
        """What gradients of the step that comes are multiplied with, unless they are clipped; None: nobody knows."""
        return self.vote.expected_factor(self.scaler.scale)

    def update(self, tally: Tally, micros: int, share_of: ShareOf) -> Decision:
        """Take the step, unless a gradient is not finite or there is none at all. One factor for all gradients.

        The loss scale is taken out, the mean over what was counted is taken, and the norm clipped.
        `share_of(has_losses, has_unannounced, has_scaled)` is given what any rank has seen, so that all get one answer
        or error.
        """
        self.changes.check_step()
        if self.offloaded is not None:
            self.offloaded.check("step")
        if (self.one_by_one or self.offloaded) and (reason := why_not_apart(self.optimizer)):
            raise UsageError(f"{type(self.optimizer).__name__} {reason}: it cannot be stepped one lot after the other")
        reduced = [store.reduce() for store in self.stores]
        is_ahead = self._is_ahead()
        terms = self.vote.terms(share_of, scale=self.scaler.scale, max_norm=self.max_norm)
        pending = self.vote.start(self._own_sums(reduced, tally, micros, is_ahead=is_ahead), terms)
        launch = self._launch(pending, is_ahead=is_ahead)
        decision = pending.read()
        self._all_ahead = decision.all_ahead
        self.vote.remember(decision)
        self.stopping.agree(decision.stops)
        self.changes.compare(decision.changed)
        if decision.verdict == "refuse":
            raise UsageError(decision.reason)
        return self._take(decision, launch) if decision.applied else self._skip(decision, reduced)

    def _is_ahead(self) -> bool:
        """Whether this rank launches the step before its norm is known. What has to be repeated must leave no trace."""
        may_repeat = not self.one_by_one and self.offloaded is None and all(rest == 1 for _, rest in self._factors())
        return self.goes_ahead and may_repeat and decides(self.optimizer)

    def _launch(self, pending: PendingDecision, *, is_ahead: bool) -> LaunchedStep:
        """Launch the step before the host knows of its norm.

        The device leaves it out where the norm is not finite or no gradient came, where ranks have seen different
        things, and where gradients turn out to need a factor that the last ones did not: its kernel would write to all
        of them. Publishing is a collective: what all ranks know of the last step decides, not what one does.
        """
        launch = LaunchedStep(is_stepped=is_ahead, is_published=self._all_ahead, is_free=self._unclipped >= STEADY)
        if launch.is_stepped:
            is_skipped = pending.is_skipped()
            is_skipped = is_skipped | (pending.factor != 1) if launch.is_free else is_skipped
            with decided(self.optimizer, None if launch.is_free else pending.factor, is_skipped):
                self._step(1.0)
        if launch.is_published:
            self._write_back()
        return launch

    def _take(self, decision: Decision, launch: LaunchedStep) -> Decision:
        """Confirm what was launched, or do it now."""
        is_confirmed = launch.is_confirmed(decision)
        self._unclipped = self._unclipped + 1 if decision.factor == 1 else 0
        if self.offloaded is not None:
            self.offloaded.step(self._lots(1.0), decision.factor)
        elif not (launch.is_stepped and is_confirmed):
            with scaled(self.optimizer, decision.factor, self.vote.device) as rest:
                self._step(rest)
        if not (launch.is_published and is_confirmed and decision.all_ahead):
            self._write_back()
        self.clear(taken=True)
        return decision

    def _skip(self, decision: Decision, reduced: Sequence[ReducedGradients]) -> Decision:
        """Leave everything as it was. Who has a gradient that is not finite is exchanged only here."""
        if decision.reason == NOT_FINITE:
            found = [name for each in reduced for name in each.nonfinite()]
            decision = replace(decision, reason=self.vote.explain_nonfinite(found))
        for lot in (lot for store in self.stores for lot in store.contents.lots):
            lot.unload()
        self.clear()
        return decision

    def _write_back(self) -> None:
        for store in self.stores:
            store.write_back()

    def _step(self, factor: float) -> None:
        """Step all lots at once, or one after the other: what only a step needs is then there for one at a time."""
        lots = self._lots(factor)
        if not self.one_by_one:
            for lot, its_factor in lots:
                lot.load(its_factor)
            self.optimizer.step()
            return
        for lot, its_factor in lots:
            lot.load(its_factor)
            with only(self.optimizer, lot.tensors):
                self.optimizer.step()
            lot.write_back()
            lot.unload()

    def _lots(self, factor: float) -> list[tuple[Lot, float]]:
        """All lots, each with what its gradients are multiplied with."""
        return [(lot, factor * rest) for store, rest in self._factors() for lot in store.contents.lots]

    def clear(self, *, taken: bool = False) -> None:
        """Forget all gradients; `taken` says that a step was taken with them."""
        self.scaler.has_scaled = False
        for store in self.stores:
            store.clear_gradients(taken=taken)

    def _own_sums(self, reduced: Sequence[ReducedGradients], tally: Tally, micros: int, *, is_ahead: bool) -> StepSums:
        """What this rank has seen and counted."""
        return StepSums(
            squares=self._squares(reduced),
            loss=tally.loss,
            count=tally.count,
            losses=tally.loss is not None,
            counted=tally.is_counted,
            unannounced=any(each.has_unannounced for each in reduced),
            scaled=self.scaler.has_scaled,
            requests=self.stopping.is_asked,
            ahead=is_ahead,
            changed=self.changes.has_new_values,
            arrived=any(each.has_arrived for each in reduced),
            micros=micros,
        )

    def _squares(self, reduced: Sequence[ReducedGradients]) -> Tensor | float:
        """Of the gradients that this rank counts, as if all stores had one factor."""
        rests = [rest for _, rest in self._factors()]
        pairs = zip(reduced, rests, strict=True)
        found = [each.squares() if rest == 1 else each.squares() * rest**2 for each, rest in pairs]
        return torch.stack(found).sum() if found else 0.0

    def _factors(self) -> list[tuple[Store, float]]:
        """Each store, with what its gradients are multiplied with beside the gain of all: 1 where all have one gain."""
        return [(store, store.ranks.step_factor / self.vote.gain) for store in self.stores]
