"""What all ranks of a job decide together in a step: one reduction, one read by the host, one decision.

A rank says what it has seen and counted, and the sums over all ranks say what to do: the same on each. What is then
done is the business of `update.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mizzen.accelerator import Fetch, get_accelerator
from mizzen.comm import collectives, groups
from mizzen.config.layout import Layout, role_in_words
from mizzen.errors import UsageError
from mizzen.plan.losses import MANY_KINDS, Role
from mizzen.wording import and_more, rank_in_role

SOME_SCALED: Final = (
    "some ranks called engine.scale(loss).backward() in this step and others a bare loss.backward(): use one of the two"
)
NO_GRADIENT: Final = (
    "no gradient arrived on any rank: the loss depends on no parameter that this engine trains, or its graph was cut "
    "(detach, no_grad, a call of another model)"
)
NOT_FINITE: Final = "the gradient norm is not finite"
SUM_OVERFLOWS: Final = "the gradient norm is not finite although every rank's own gradients are: their sum overflows"


class StepSums(NamedTuple):
    """What a rank says, and then the sums of it over all ranks: 0-d fp64 tensors on the device, and later numbers."""

    squares: Any
    """Of the gradients that a rank counts: over all ranks, every element of the model once."""
    loss: Any
    count: Any
    losses: Any
    """Ranks that have seen a loss."""
    counted: Any
    """Ranks whose losses came as `(sum, count)`."""
    unannounced: Any
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


class Seen(NamedTuple):
    """What the ranks that have losses have seen in a step."""

    has_losses: bool
    is_counted: bool
    has_unannounced: bool
    has_scaled: bool

    @classmethod
    def of(cls, sums: StepSums) -> "Seen":
        """What any rank has seen."""
        return cls(*(bool(count > 0) for count in _counts(sums)))


ShareOf = Callable[[bool, bool, bool], float]
"""What gradients are still to be multiplied with, from (has_losses, has_unannounced, has_scaled); or a UsageError."""


@dataclass(frozen=True, slots=True)
class StepTerms:
    """What the norm and the factor of a step follow from, beside what is summed. The same on every rank."""

    share_of: ShareOf
    gain: float
    """What the mean gradient is multiplied with, where the sum over ranks was asked for."""
    scale: float
    """What losses were multiplied with."""
    max_norm: float
    ranks: int
    loss_ranks: int
    expected: Seen | None = None
    """What ranks without losses take it that the others have seen: what those saw in the step before.

    None where all ranks have losses.
    """

    def share(self, seen: Seen) -> float:
        """What gradients are multiplied with before anything is clipped."""
        return self.share_of(seen.has_losses, seen.has_unannounced, seen.has_scaled) * self.gain / self.scale

    def norm_and_factor(self, sums: StepSums, seen: Seen, share: float) -> tuple[Tensor, Tensor]:
        """The norm, rounded to fp32 once, and what gradients are to be multiplied with: where the sums are."""
        squares = sums.squares
        factor = torch.full_like(squares, share)
        if seen.is_counted:
            factor = torch.where(sums.count == 0, 0.0, factor * (self.loss_ranks / sums.count))
        norm = (squares.sqrt() * factor.abs()).float().to(squares)
        if self.max_norm > 0:  # torch's own rule
            factor = factor * (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm, factor

    def is_unforeseen(self, sums: StepSums) -> Any:
        """Whether some rank has found by something else than what the ranks with losses have all seen.

        So it is while there are new values in the model: they are compared first.
        """
        some, kind, strange, scaled = ((count > 0) & (count != self.loss_ranks) for count in _counts(sums))
        found = some | kind | strange | scaled | (sums.changed > 0)
        for count, was in zip(_counts(sums), self.expected or (), strict=False):
            found = found | ((count > 0) != was)
        return found


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a step. Every rank has the same one."""

    verdict: Literal["take", "skip", "refuse"]
    reason: str
    """Why it is not taken."""
    norm: float
    factor: float
    """What gradients are to be multiplied with."""
    loss: float | None
    """The mean over what was counted."""
    micros: float
    """Micro-batches of a rank, in the mean over the ranks."""
    seen: Seen
    is_foreseen: bool
    """Whether what was launched before the numbers came was launched with the right ones."""
    all_ahead: bool
    """Whether every rank has launched the step before the numbers came."""
    stops: bool
    """Whether a rank was asked to stop."""
    changed: float
    """Ranks on which parameters have new values."""

    @property
    def applied(self) -> bool:
        """Whether the step is taken."""
        return self.verdict == "take"

    @property
    def has_overflowed(self) -> bool:
        """Whether gradients were not finite."""
        return not math.isfinite(self.norm)


def decide(values: Tensor, terms: StepTerms) -> Decision:
    """What follows from the sums over all ranks, and from the norm and factor that stand behind them. On the host."""
    *numbers, norm, factor = values.tolist()
    total = StepSums(*numbers)
    seen, is_foreseen = Seen.of(total), not terms.is_unforeseen(total)
    refusal = _refusal(total, seen, terms)
    if not refusal and not is_foreseen:
        found = terms.norm_and_factor(StepSums(*values[:-2]), seen, terms.share(seen))
        norm, factor = (value.item() for value in found)
    reason = refusal or (NO_GRADIENT if not total.arrived else "" if math.isfinite(norm) else NOT_FINITE)
    return Decision(
        verdict="refuse" if refusal else "skip" if reason else "take",
        reason=reason,
        norm=norm,
        factor=factor,
        loss=total.loss / total.count if total.count else None,
        micros=total.micros / terms.ranks,
        seen=seen,
        is_foreseen=is_foreseen,
        all_ahead=total.ahead == terms.ranks,
        stops=total.requests > 0,
        changed=total.changed,
    )


def _refusal(total: StepSums, seen: Seen, terms: StepTerms) -> str:
    """What is wrong with how the step was used; empty if nothing is."""
    if 0 < total.counted < total.losses:
        return MANY_KINDS
    try:
        terms.share(seen)
    except UsageError as error:
        return str(error)
    return SOME_SCALED if 0 < total.scaled < total.unannounced else ""


class PendingDecision:
    """A vote under way: the sums are on the device, and on their way to the host."""

    def __init__(self, sums: StepSums, guess: Seen, terms: StepTerms) -> None:
        self.sums = sums
        self.terms = terms
        self.norm, self.factor = terms.norm_and_factor(sums, guess, _or_nan(terms, guess))
        self._coming = Fetch(torch.stack([*sums, self.norm, self.factor]), get_accelerator())

    def is_skipped(self) -> Tensor:
        """Whether there is no step to take with the factor, as far as the device can tell."""
        off: Tensor = ~self.norm.isfinite() | (self.sums.arrived == 0) | self.terms.is_unforeseen(self.sums)
        return off

    def read(self) -> Decision:
        """Wait for the sums: the one time in a step that the host waits for the device."""
        return decide(self._coming.read(), self.terms)


class Vote:
    """The ranks that take a step together, which are all of the job."""

    def __init__(
        self,
        group: ProcessGroup | None,
        device: torch.device,
        role: Role | None = None,
        *,
        gain: float = 1.0,
        layout: Layout | None = None,
    ) -> None:
        self.group = group
        """None for one rank."""
        self.device = device
        self.ranks = groups.get_world_size(group) if group is not None else 1
        self.role = role or Role(self.ranks)
        self.layout = layout
        """By which ranks are named with their roles."""
        self.gain = gain
        """What the mean gradient is multiplied with on every rank: 1, or the ranks where their sum was asked for."""
        self._last = Seen(has_losses=True, is_counted=False, has_unannounced=False, has_scaled=False)
        """What the ranks with losses saw in the last step."""

    def terms(self, share_of: ShareOf, *, scale: float = 1.0, max_norm: float = 0.0) -> StepTerms:
        """The terms of the next step."""
        is_for_all = self.role.loss_ranks == self.ranks
        return StepTerms(
            share_of, self.gain, scale, max_norm, self.ranks, self.role.loss_ranks, None if is_for_all else self._last
        )

    def expected_factor(self, scale: float) -> float | None:
        """The factor of a step that is not clipped, if ranks see what they saw in the last; None: a sum decides it."""
        return None if self._last.is_counted or self._last.has_unannounced else self.gain / scale

    def start(self, mine: StepSums, terms: StepTerms) -> PendingDecision:
        """Add up what all ranks say: the one reduction of a step. Numbers get to the device without a copy."""
        guess = Seen.of(mine) if self.role.has_losses else self._last
        sums = self._on_device(mine)
        if self.group is not None:
            collectives.all_reduce(sums, group=self.group)
        return PendingDecision(StepSums(*sums.unbind()), guess, terms)

    def _on_device(self, mine: StepSums) -> Tensor:
        """What a rank says, as one tensor: from numbers on a CPU, and on a device from tensors, without a wait."""
        numbers = [value.detach() if isinstance(value, Tensor) else float(value or 0) for value in mine]
        if self.device.type == "cpu":
            return torch.tensor([float(value) for value in numbers], dtype=torch.float64)
        return torch.stack(
            [
                value.to(self.device, torch.float64)
                if isinstance(value, Tensor)
                else torch.full((), value, dtype=torch.float64, device=self.device)
                for value in numbers
            ]
        )

    def remember(self, decision: Decision) -> None:
        """Remember for the next step what was seen in this one."""
        self._last = decision.seen

    def explain_nonfinite(self, mine: Sequence[str]) -> str:
        """Name every rank and parameter whose own gradient was not finite. All ranks come here together."""
        named = [sorted(mine)]
        if self.group is not None:
            gathered: list[list[str]] = [[] for _ in range(self.ranks)]
            collectives.all_gather_object(gathered, named[0], group=self.group)
            named = gathered
        found = [
            f"{self._name(groups.get_global_rank(self.group, rank) if self.group else 0)}: {and_more(names, 3)}"
            for rank, names in enumerate(named)
            if names
        ]
        return "gradient not finite on " + "; ".join(found) if found else SUM_OVERFLOWS

    def _name(self, rank: int) -> str:
        return rank_in_role(rank, role_in_words(self.layout, rank) if self.layout is not None else "")


def _counts(sums: StepSums) -> tuple[Any, Any, Any, Any]:
    """The ranks that have seen each thing of `Seen`."""
    return sums.losses, sums.counted, sums.unannounced, sums.scaled


def _or_nan(terms: StepTerms, guess: Seen) -> float:
    """The share for what this rank has seen; where there is none, the step is not taken by it."""
    try:
        return terms.share(guess)
    except UsageError:
        return math.nan
