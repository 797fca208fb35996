"""Statistics of systems that took turns. A round is one turn of each system; only turns of one round are compared.

What slows a machine down for a while slows all systems of a round alike, so ratios within rounds keep their meaning
where times of different rounds do not.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

Turns = Sequence[Sequence[float]]
"""Seconds of each step, turn by turn."""

DRAWS: Final = 4000
COVERED: Final = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """How long one system takes for what another does in 1, and the interval that covers 95 % of the resampled ones."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} - {self.high:.3f})"

    def as_overhead(self) -> str:
        """The ratio as a difference in percent."""
        value, low, high = (100 * (number - 1) for number in (self.value, self.low, self.high))
        return f"{value:+.1f} % ({low:+.1f} - {high:+.1f})"


def typical(turns: Turns) -> float:
    """The median of all steps."""
    return median(seconds for turn in turns for seconds in turn)


def ratio(of: Turns, to: Turns, *, draws: int = DRAWS, seed: int = 0) -> Ratio:
    """The median over rounds of the ratio of the median steps, with a bootstrap interval.

    A draw takes rounds with replacement, and within each of them steps of either system. With few rounds the interval
    tells the noise within turns but hardly that between them, so it is then too narrow.
    """
    if len(of) != len(to) or not of:
        raise ValueError(f"{len(of)} turns cannot be paired with {len(to)}")
    pairs = list(zip(of, to, strict=True))
    draw = random.Random(seed)

    def again() -> float:
        chosen = draw.choices(pairs, k=len(pairs))
        return median(median(_again(ours, draw)) / median(_again(theirs, draw)) for ours, theirs in chosen)

    found = sorted(again() for _ in range(draws))
    outside = (1 - COVERED) / 2
    value = median(median(ours) / median(theirs) for ours, theirs in pairs)
    return Ratio(value, found[int(outside * draws)], found[int((1 - outside) * draws)])


def _again(steps: Sequence[float], draw: random.Random) -> Sequence[float]:
    return draw.choices(steps, k=len(steps)) if len(steps) > 1 else steps
