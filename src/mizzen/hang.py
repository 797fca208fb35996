"""When a wait counts as a hang, and who is waited for: decided from what ranks say of themselves. Pure.

Two readers of records ask this. The launcher's supervisor sees the progress record of every rank. A rank that waits
sees what its peers have published; under plain torchrun it is the only one that looks.

A rank that waits in one of our calls for longer than the limit waits for somebody. While no rank waits (an evaluation,
a compilation, a long load of data by all of them), nothing is a hang.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from mizzen.progress import Record
from mizzen.wording import and_more, rank_in_role

NEVER: Final = -2
"""A step that no rank has: that of one that nothing was heard of."""


@dataclass(frozen=True, slots=True)
class RankState:
    """Where one rank is in its training, and whether it waits in a collective."""

    rank: int
    host: str = ""
    step: int = -1
    """Finished optimizer steps; -1 before the engine has said anything, `NEVER` for a rank that was not heard of."""
    unit: str = ""
    phase: str = ""
    collective: str = ""
    """The last collective that the rank has come to."""
    number: int = 0
    """Which collective of its group that is."""
    is_waiting: bool = False
    waited: float = 0.0
    has_ended: bool = False
    elsewhere: str = ""
    """A call that is not ours in which the rank is."""
    stack: str = ""
    role: str = ""
    """Which part of the model the rank has."""

    @classmethod
    def of(cls, record: Record, host: str, now: float, *, has_ended: bool = False) -> "RankState":
        """From a progress record, as of now; a rank that has ended waits no more."""
        is_waiting = record.waiting and not has_ended
        return cls(
            rank=record.rank,
            host=host,
            step=record.step,
            unit=record.unit,
            phase=record.phase,
            collective=record.collective,
            number=record.number,
            is_waiting=is_waiting,
            waited=now - record.entered if is_waiting else 0.0,
            has_ended=has_ended,
            role=record.role,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @property
    def name(self) -> str:
        """The rank, with its role where it has one."""
        return rank_in_role(self.rank, self.role)

    @property
    def where(self) -> str:
        """Where the rank is, in words."""
        parts = [f"step {self.step}"] if self.step >= 0 else []
        parts += [f"unit {self.unit!r}"] if self.unit else []
        parts += [f"phase {self.phase!r}"] if self.phase else []
        parts = parts or ["never heard of" if self.step == NEVER else "alive"]
        parts += ["has ended"] if self.has_ended else []
        return ", ".join([*parts, f"in {self.elsewhere}"] if self.elsewhere else parts)


@dataclass(frozen=True, slots=True)
class Hang:
    """The verdict: the rank that has waited longest, and those that it waits for."""

    waiting: RankState
    missing: tuple[RankState, ...]

    def __str__(self) -> str:
        longest = self.waiting
        absent = [
            f"{one.name} on {one.host} is not there: {one.where}"
            + (f", after {one.collective}" if one.collective else "")
            for one in self.missing
        ]
        who = and_more(absent, separator="; ") or "every rank waits, and none is behind the others"
        what = f"has waited {longest.waited:.1f} s in {longest.collective} after step {longest.step}"
        return f"hung: {longest.name} {what}; {who}"

    @property
    def peers_in_words(self) -> str:
        """The missing ranks as the waiting one tells of its peers."""
        told = ((one.rank, ", ".join(filter(None, (one.role, one.where)))) for one in self.missing)
        return and_more([rank_in_role(rank, words) for rank, words in told])


def find_hang(ranks: Sequence[RankState], limit: float, *, first_step: int = 1) -> Hang | None:
    """The hang that these states show: a rank has waited for longer than `limit` seconds. 0 means no limit.

    Ranks that have finished fewer than `first_step` steps may take their time: a first step compiles and loads.
    """
    late = [one for one in ranks if one.is_waiting and one.step >= first_step and one.waited > limit]
    return Hang(max(late, key=lambda one: one.waited), _missing(ranks)) if limit > 0 and late else None


def _missing(ranks: Sequence[RankState]) -> tuple[RankState, ...]:
    """Who is waited for: the ranks that do not wait; when all do, those that are behind."""
    away = tuple(one for one in ranks if not one.is_waiting)
    if away:
        return away
    least = min(one.number for one in ranks)
    behind = tuple(one for one in ranks if one.number == least)
    return behind if len(behind) < len(ranks) else ()
