"""What a hang is, and who caused it: decided from what all ranks say of themselves. Pure.

A rank that waits in one of our calls for longer than the limit, after its first step, waits for somebody. While no rank
waits (an evaluation, a compilation, a long load of data by all of them), nothing is a hang.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mizzen.progress import Record


@dataclass(frozen=True, slots=True)
class Sighting:
    """Where one rank is."""

    rank: int
    host: str
    step: int
    phase: str
    collective: str
    number: int
    is_waiting: bool
    waited: float
    stack: str = ""

    @classmethod
    def of(cls, rank: int, host: str, record: Record, now: float) -> "Sighting":
        """From a record, as of now."""
        return cls(
            rank=rank,
            host=host,
            step=record.step,
            phase=record.phase,
            collective=record.collective,
            number=record.number,
            is_waiting=record.waiting,
            waited=now - record.entered if record.waiting else 0.0,
        )

    def as_dict(self) -> dict[str, Any]:
        """For the store."""
        return asdict(self)

    def __str__(self) -> str:
        if self.is_waiting:
            return f"rank {self.rank} has waited {self.waited:.1f} s in {self.collective} after step {self.step}"
        last = f", after {self.collective}" if self.collective else ""
        return f"rank {self.rank} on {self.host} is not there: step {self.step}, {self.phase or 'no phase'}{last}"


def is_hung(sightings: Sequence[Sighting], limit: float) -> bool:
    """Whether some rank has waited for longer than the limit, after a step of its own."""
    return limit > 0 and any(seen.is_waiting and seen.step >= 1 and seen.waited > limit for seen in sightings)


def culprits(sightings: Sequence[Sighting]) -> list[Sighting]:
    """Who is waited for: those who do not wait; when all do, those who are behind."""
    away = [seen for seen in sightings if not seen.is_waiting]
    if away or not sightings:
        return away
    least = min(seen.number for seen in sightings)
    behind = [seen for seen in sightings if seen.number == least]
    return behind if len(behind) < len(sightings) else []


def sentence(sightings: Sequence[Sighting]) -> str:
    """Who waits, and for whom."""
    longest = max((seen for seen in sightings if seen.is_waiting), key=lambda seen: seen.waited, default=None)
    guilty = culprits(sightings)
    named = "; ".join(map(str, guilty[:8])) + (f" and {len(guilty) - 8} more" if len(guilty) > 8 else "")
    who = named or "every rank waits, and none is behind the others"
    return f"hung: {longest}; {who}" if longest is not None else f"hung: {who}"
