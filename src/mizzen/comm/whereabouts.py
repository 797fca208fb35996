"""What the ranks of a job tell each other about themselves, and what follows from it for one that waits.

Values and pure functions only. Who publishes and reads them, and when, is in `watch.py`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from mizzen.hang import NEVER, RankState

NAMED_PEERS: Final = 64
"""A wait for more peers than this is published without their ranks: the record has to stay small."""
LASTING: Final = 3
"""Records in a row that show a peer in a call of torch's before it counts as waiting there: the first may be old."""
LASTING_MESSAGE: Final = 30
"""The same for a message: a large one may be under way for a while, from a rank that has gone on meanwhile."""

PARTED: Final = "the ranks have parted ways"


@dataclass(frozen=True, slots=True)
class Calls:
    """What a rank has done in one group. Collectives are numbered from 1 in the order in which they were issued."""

    issued: int = 0
    finished: int = 0
    recent: tuple[tuple[int, str], ...] = ()
    """The last few as (number, title)."""
    failed: int = 0
    """The last one that failed on this rank, by number."""
    failure: str = ""
    """Why it did."""


@dataclass(frozen=True, slots=True)
class Wait:
    """An operation that a rank has been waiting in for a while."""

    group: str
    """The name of the group."""
    number: int
    """Which of the group's collectives; 0 for a message between two ranks."""
    title: str
    place: str
    """The number and the group in words."""
    peers: tuple[int, ...]
    """The other ranks that must take part."""
    on_main_thread: bool


@dataclass(frozen=True, slots=True)
class Outside:
    """A call of torch.distributed that the script has made itself, in which the main thread of a rank is."""

    operation: str
    place: str
    """File and line of the script."""
    group: str
    """The name of the group."""
    peers: tuple[int, ...] | None
    """The ranks that it waits for; None for all ranks of the job."""
    is_message: bool = False


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What one rank tells the others, about once a second."""

    rank: int
    process: str
    """Machine and process, such as `6f2c:4026531836:4711`."""
    beat: int = 0
    """Grows with every publication."""
    written: float = 0.0
    """The time of day, in seconds."""
    step: int = -1
    unit: str = ""
    phase: str = ""
    calls: Mapping[str, Calls] = field(default_factory=dict)
    waits: tuple[Wait, ...] = ()
    left: str = ""
    """Why the rank has left the job, once it has."""
    outside: Outside | None = None
    """Where its main thread is, while that is in a call of torch.distributed that is not ours."""

    def pack(self) -> bytes:
        """For the store."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes) -> "Whereabouts":
        """What another rank has packed."""
        fields = json.loads(data)
        fields["calls"] = {
            name: Calls(**calls | {"recent": tuple((number, title) for number, title in calls["recent"])})
            for name, calls in fields["calls"].items()
        }
        if (outside := fields["outside"]) is not None:
            peers = outside["peers"]
            fields["outside"] = Outside(**outside | {"peers": None if peers is None else tuple(peers)})
        fields["waits"] = tuple(Wait(**wait | {"peers": tuple(wait["peers"])}) for wait in fields["waits"])
        return cls(**fields)

    @property
    def place(self) -> str:
        """Where the rank is in its training, in words; empty when it has not said."""
        parts = [f"step {self.step}"] if self.step >= 0 else []
        parts += [f"unit {self.unit!r}"] if self.unit else []
        parts += [f"phase {self.phase!r}"] if self.phase else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a waiting rank knows of a peer."""

    whereabouts: Whereabouts
    silence: float = 0.0
    """Seconds without a new record, counted only while the observer itself was running."""
    gone: bool = False
    """Whether its process is known to exist no more."""
    lasting: int = 0
    """Records in a row that had it in the same call of torch's."""


@dataclass(frozen=True, slots=True)
class Case:
    """A wait to be judged: who waits, in what, and the most silence that is still normal."""

    own: Whereabouts
    wait: Wait
    patience: float


def verdict(case: Case, sightings: Mapping[int, Sighting]) -> str | None:
    """Why a wait will never end, naming the peer; None when it still may. Causes come before their consequences."""
    for check in _CHECKS:
        for rank in case.wait.peers:
            sighting = sightings.get(rank)
            if sighting is not None and (reason := check(case, sighting)):
                place = sighting.whereabouts.place
                is_told = not place or PARTED in reason
                return f"rank {rank} {reason}" + ("" if is_told else f" (it was at {place})")
    return None


def states(
    own: Whereabouts, wait: Wait, waited: float, sightings: Mapping[int, Sighting]
) -> tuple[RankState, list[RankState]]:
    """This rank and the peers of a wait, for `find_hang`: a peer that has come to the collective waits there, too."""
    here: dict[str, Any] = {"collective": wait.title, "number": wait.number, "is_waiting": True}
    me = RankState(own.rank, step=own.step, unit=own.unit, phase=own.phase, waited=waited, **here)
    peers = []
    for rank in wait.peers:
        sighting = sightings.get(rank)
        has_come = _calls(wait, sighting).issued >= wait.number
        if sighting is None:
            state = RankState(rank, step=NEVER)
        else:
            seen, outside = sighting.whereabouts, sighting.whereabouts.outside
            elsewhere = f"torch.distributed.{outside.operation}() at {outside.place}" if outside else ""
            state = RankState(rank, step=seen.step, unit=seen.unit, phase=seen.phase, elsewhere=elsewhere)
        peers.append(replace(state, **here) if has_come else state)
    return me, peers


def _calls(wait: Wait, sighting: Sighting | None) -> Calls:
    return sighting.whereabouts.calls.get(wait.group, Calls()) if sighting else Calls()


def _has_done_its_part(case: Case, sighting: Sighting) -> bool:
    return case.wait.number > 0 and _calls(case.wait, sighting).finished >= case.wait.number


def _entered_another(case: Case, sighting: Sighting) -> str | None:
    title = dict(_calls(case.wait, sighting).recent).get(case.wait.number)
    if case.wait.number and title not in (None, case.wait.title):
        return f"entered {title} as {case.wait.place}: {_parted(case, sighting, case.wait.title, title)}"
    return None


def _left_the_order(case: Case, sighting: Sighting) -> str | None:
    """The peer brings to an earlier call what was not agreed on, or has failed in it; this rank has gone on from it."""
    ours, theirs = case.own.calls.get(case.wait.group, Calls()), _calls(case.wait, sighting)
    titles, waits = (
        dict(ours.recent),
        [wait.number for wait in sighting.whereabouts.waits if wait.group == case.wait.group],
    )
    waits += [theirs.failed] if theirs.failed == theirs.issued != ours.failed else []
    for number, title in theirs.recent:
        if number in waits and number < case.wait.number and titles.get(number, title) != title:
            return f"entered {title} as call {number} of it: {_parted(case, sighting, titles[number], title)}"
    return None


def _parted(case: Case, sighting: Sighting, ours: str, theirs: str) -> str:
    """That two ranks have parted ways, and where each of them is, if they have said."""
    told = {}
    for seen, title in ((case.own, ours), (sighting.whereabouts, theirs)):
        told[seen.rank] = title if title.startswith("step ") or not seen.place else f"{seen.place}: {title}"
    if not any(told[rank].startswith("step ") for rank in told):
        return PARTED
    return f"{PARTED}. " + "; ".join(f"rank {rank} at {told[rank]}" for rank in sorted(told))


def _is_gone(case: Case, sighting: Sighting) -> str | None:
    if sighting.gone and not sighting.whereabouts.left and not _has_done_its_part(case, sighting):
        return "was killed or has crashed: its process exists no more"
    return None


def _has_left(case: Case, sighting: Sighting) -> str | None:
    if sighting.whereabouts.left and not _has_done_its_part(case, sighting):
        return f"has left: {sighting.whereabouts.left}"
    return None


def _waits_for_us(case: Case, sighting: Sighting) -> str | None:
    """Both wait, each in a collective that the other has not come to, and neither can come.

    Only between main threads: a thread that saves in the background may wait while the main thread is on its way.
    """
    if not case.wait.number or not case.wait.on_main_thread:
        return None
    if _calls(case.wait, sighting).issued >= case.wait.number:
        return None
    for theirs in sighting.whereabouts.waits:
        ours = case.own.calls.get(theirs.group, Calls())
        if theirs.on_main_thread and case.own.rank in theirs.peers and ours.issued < theirs.number:
            return f"waits for rank {case.own.rank} in {theirs.title} ({theirs.place}): neither can go on"
    return None


def _waits_outside(case: Case, sighting: Sighting) -> str | None:
    """The peer waits for this rank in a call that is not ours. One that all have come to is left soon: it has to last.

    The same operation in the same group is no other one: half of the ranks call it by torch's name, half by ours.
    """
    outside = sighting.whereabouts.outside
    if outside is None or not case.wait.number or not case.wait.on_main_thread:
        return None
    if sighting.lasting < (LASTING_MESSAGE if outside.is_message else LASTING):
        return None
    if _calls(case.wait, sighting).issued >= case.wait.number:
        return None
    if outside.peers is not None and case.own.rank not in outside.peers:
        return None
    if (outside.group, outside.operation) == (case.wait.group, case.wait.title.partition(" ")[0]):
        return None
    what = f"torch.distributed.{outside.operation}() at {outside.place}"
    return f"waits for rank {case.own.rank} in {what}, which is not the call that this rank waits in: neither can go on"


def _has_failed(case: Case, sighting: Sighting) -> str | None:
    calls = _calls(case.wait, sighting)
    return f"failed in it: {calls.failure}" if case.wait.number and calls.failed == case.wait.number else None


def _is_silent(case: Case, sighting: Sighting) -> str | None:
    if sighting.silence <= case.patience or _has_done_its_part(case, sighting):
        return None
    return f"has not been heard of for {sighting.silence:.0f} s: it is stopped, frozen or cut off"


_CHECKS: Final[Sequence[Callable[[Case, Sighting], str | None]]] = (
    _entered_another,
    _left_the_order,
    _is_gone,
    _has_left,
    _waits_for_us,
    _waits_outside,
    _has_failed,
    _is_silent,
)
