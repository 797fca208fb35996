"""What the ranks of a job tell each other about themselves, and what follows from it for one that waits.

A rank publishes where it is, which collectives it has made, and what it waits in; `verdict` says why a wait will never
end. A call of torch.distributed that the script makes itself is seen by the stack of the main thread; one that was
started with `async_op=True` and is waited for later leaves no frame, and is not seen. Who publishes and reads a status,
and when, is in `watchdog.py`.
"""

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

import psutil
import torch.distributed as dist

from mizzen.hang import NEVER, RankState
from mizzen.wording import rank_in_role

NAMED_PEERS: Final = 64
"""A wait for more peers than this is published without their ranks: the record has to stay small."""
LASTING: Final = 3
"""Records in a row that show a peer in a call of torch's before it counts as waiting there: the first may be old."""
LASTING_MESSAGE: Final = 30
"""Records in a row before a message counts as waiting: a large one may be under way while its sender goes on."""

PARTED: Final = "the ranks have parted ways"
MESSAGES: Final = {"send": "dst", "recv": "src"}
ROOTED: Final = {
    **MESSAGES,
    "broadcast": "src",
    "broadcast_object_list": "src",
    "scatter": "src",
    "scatter_object_list": "src",
    "reduce": "dst",
    "gather": "dst",
    "gather_object": "dst",
}
"""Operations with one rank that all others wait for, and the argument that names it."""
JOINT: Final = {
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "new_group",
    "reduce_scatter",
    "reduce_scatter_tensor",
}
"""Operations that end when every rank has come."""
OTHER_NAMES: Final = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}


@dataclass(frozen=True, slots=True)
class GroupCalls:
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
class TorchCall:
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
class RankStatus:
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
    calls: Mapping[str, GroupCalls] = field(default_factory=dict)
    waits: tuple[Wait, ...] = ()
    left: str = ""
    """Why the rank has left the job, once it has."""
    role: str = ""
    """Which part of the model the rank has."""
    torch_call: TorchCall | None = None
    """Where its main thread is, while that is in a call of torch.distributed that is not ours."""

    def pack(self) -> bytes:
        """For the store."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes) -> "RankStatus":
        """What another rank has packed."""
        fields = json.loads(data)
        fields["calls"] = {
            name: GroupCalls(**calls | {"recent": tuple((number, title) for number, title in calls["recent"])})
            for name, calls in fields["calls"].items()
        }
        if (torch_call := fields["torch_call"]) is not None:
            peers = torch_call["peers"]
            fields["torch_call"] = TorchCall(**torch_call | {"peers": None if peers is None else tuple(peers)})
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
class PeerStatus:
    """What a waiting rank knows of a peer."""

    status: RankStatus
    silence: float = 0.0
    """Seconds without a new record, counted only while the observer itself was running."""
    gone: bool = False
    """Whether its process is known to exist no more."""
    lasting: int = 0
    """Records in a row that had it in the same call of torch's."""


@dataclass(frozen=True, slots=True)
class Case:
    """A wait to be judged: who waits, in what, and the most silence that is still normal."""

    own: RankStatus
    wait: Wait
    patience: float


def verdict(case: Case, peer_statuses: Mapping[int, PeerStatus]) -> str | None:
    """Why a wait will never end, naming the peer; None when it still may. Causes come before their consequences."""
    for check in _CHECKS:
        for rank in case.wait.peers:
            peer = peer_statuses.get(rank)
            if peer is not None and (reason := check(case, peer)):
                place = peer.status.place
                is_told = not place or PARTED in reason
                return f"{rank_in_role(rank, peer.status.role)} {reason}" + ("" if is_told else f" (it was at {place})")
    return None


def states(
    own: RankStatus, wait: Wait, waited: float, peer_statuses: Mapping[int, PeerStatus]
) -> tuple[RankState, list[RankState]]:
    """This rank and the peers of a wait, for `find_hang`: a peer that has come to the collective waits there, too."""
    here: dict[str, Any] = {"collective": wait.title, "number": wait.number, "is_waiting": True}
    me = RankState(own.rank, step=own.step, unit=own.unit, phase=own.phase, waited=waited, role=own.role, **here)
    peers = []
    for rank in wait.peers:
        peer = peer_statuses.get(rank)
        has_come = wait.number > 0 and _calls(wait, peer).issued >= wait.number
        if peer is None:
            state = RankState(rank, step=NEVER)
        else:
            seen, torch_call = peer.status, peer.status.torch_call
            elsewhere = f"torch.distributed.{torch_call.operation}() at {torch_call.place}" if torch_call else ""
            if not wait.number and seen.waits:  # whoever owes a message may wait for one itself
                elsewhere = seen.waits[0].title
            state = RankState(
                rank, step=seen.step, unit=seen.unit, phase=seen.phase, elsewhere=elsewhere, role=seen.role
            )
        peers.append(replace(state, **here) if has_come else state)
    return me, peers


def _calls(wait: Wait, peer: PeerStatus | None) -> GroupCalls:
    return peer.status.calls.get(wait.group, GroupCalls()) if peer else GroupCalls()


def _has_done_its_part(case: Case, peer: PeerStatus) -> bool:
    return case.wait.number > 0 and _calls(case.wait, peer).finished >= case.wait.number


def _entered_another(case: Case, peer: PeerStatus) -> str | None:
    title = dict(_calls(case.wait, peer).recent).get(case.wait.number)
    if case.wait.number and title not in (None, case.wait.title):
        return f"entered {title} as {case.wait.place}: {_parted(case, peer, case.wait.title, title)}"
    return None


def _left_the_order(case: Case, peer: PeerStatus) -> str | None:
    """The peer brings to an earlier call what was not agreed on, or has failed in it; this rank has gone on from it."""
    ours, theirs = case.own.calls.get(case.wait.group, GroupCalls()), _calls(case.wait, peer)
    titles, waits = (
        dict(ours.recent),
        [wait.number for wait in peer.status.waits if wait.group == case.wait.group],
    )
    waits += [theirs.failed] if theirs.failed == theirs.issued != ours.failed else []
    for number, title in theirs.recent:
        if number in waits and number < case.wait.number and titles.get(number, title) != title:
            return f"entered {title} as call {number} of it: {_parted(case, peer, titles[number], title)}"
    return None


def _parted(case: Case, peer: PeerStatus, ours: str, theirs: str) -> str:
    """That two ranks have parted ways, and where each of them is, if they have said."""
    told = {}
    for seen, title in ((case.own, ours), (peer.status, theirs)):
        told[seen.rank] = title if title.startswith("step ") or not seen.place else f"{seen.place}: {title}"
    if not any(told[rank].startswith("step ") for rank in told):
        return PARTED
    return f"{PARTED}. " + "; ".join(f"rank {rank} at {told[rank]}" for rank in sorted(told))


def _is_gone(case: Case, peer: PeerStatus) -> str | None:
    if peer.gone and not peer.status.left and not _has_done_its_part(case, peer):
        return "was killed or has crashed: its process exists no more"
    return None


def _has_left(case: Case, peer: PeerStatus) -> str | None:
    if peer.status.left and not _has_done_its_part(case, peer):
        return f"has left: {peer.status.left}"
    return None


def _waits_for_us(case: Case, peer: PeerStatus) -> str | None:
    """Both wait, each in a collective that the other has not come to, and neither can come.

    Only between main threads: a thread that saves in the background may wait while the main thread is on its way.
    """
    if not case.wait.number or not case.wait.on_main_thread:
        return None
    if _calls(case.wait, peer).issued >= case.wait.number:
        return None
    for theirs in peer.status.waits:
        ours = case.own.calls.get(theirs.group, GroupCalls())
        if theirs.on_main_thread and case.own.rank in theirs.peers and ours.issued < theirs.number:
            return f"waits for rank {case.own.rank} in {theirs.title} ({theirs.place}): neither can go on"
    return None


def _waits_outside(case: Case, peer: PeerStatus) -> str | None:
    """The peer waits for this rank in a call that is not ours. One that all have come to is left soon: it has to last.

    The same operation in the same group is no other one: half of the ranks call it by torch's name, half by ours.
    """
    torch_call = peer.status.torch_call
    if torch_call is None or not case.wait.number or not case.wait.on_main_thread:
        return None
    if peer.lasting < (LASTING_MESSAGE if torch_call.is_message else LASTING):
        return None
    if _calls(case.wait, peer).issued >= case.wait.number:
        return None
    if torch_call.peers is not None and case.own.rank not in torch_call.peers:
        return None
    if (torch_call.group, torch_call.operation) == (case.wait.group, case.wait.title.partition(" ")[0]):
        return None
    what = f"torch.distributed.{torch_call.operation}() at {torch_call.place}"
    return f"waits for rank {case.own.rank} in {what}, which is not the call that this rank waits in: neither can go on"


def _has_failed(case: Case, peer: PeerStatus) -> str | None:
    calls = _calls(case.wait, peer)
    return f"failed in it: {calls.failure}" if case.wait.number and calls.failed == case.wait.number else None


def _is_silent(case: Case, peer: PeerStatus) -> str | None:
    if peer.silence <= case.patience or _has_done_its_part(case, peer):
        return None
    return f"has not been heard of for {peer.silence:.0f} s: it is stopped, frozen or cut off"


_CHECKS: Final[Sequence[Callable[[Case, PeerStatus], str | None]]] = (
    _entered_another,
    _left_the_order,
    _is_gone,
    _has_left,
    _waits_for_us,
    _waits_outside,
    _has_failed,
    _is_silent,
)


def torch_call_now() -> TorchCall | None:
    """The call in which the main thread of this process is now; None when it is elsewhere, or in a call of ours."""
    frame, found = sys._current_frames().get(threading.main_thread().ident or 0), None
    while frame is not None and _module(frame).startswith("torch.distributed."):
        found = frame if _operation(frame) in ROOTED.keys() | JOINT else found
        frame = frame.f_back
    if found is None or frame is None or _module(frame).startswith("mizzen."):
        return None
    while frame.f_back is not None and _module(frame).startswith("torch."):
        frame = frame.f_back
    file = frame.f_code.co_filename.rpartition("/")[2]
    return _describe(found, f"{file}:{frame.f_lineno}")


def _describe(frame: FrameType, place: str) -> TorchCall | None:
    given, operation = dict(frame.f_locals), _operation(frame)
    group = given.get("group") or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    peers: tuple[int, ...] | None = ranks
    if operation in ROOTED:
        root = given.get(f"group_{ROOTED[operation]}")
        named = ranks[root] if isinstance(root, int) else given.get(ROOTED[operation])
        if not isinstance(named, int):
            return None
        # The root itself waits for all others, unless it is a message.
        peers = (named,) if named != dist.get_rank() or operation in MESSAGES else ranks
    if peers == ranks and group is dist.group.WORLD:
        peers = None
    return TorchCall(operation, place, group.group_name, peers, operation in MESSAGES)


def _operation(frame: FrameType) -> str:
    return OTHER_NAMES.get(frame.f_code.co_name, frame.f_code.co_name)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def this_process() -> str:
    """A name for this process that other processes of the same machine can look up."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        machine = socket.gethostname()
    return f"{machine}:{os.getpid()}"


def is_elsewhere(process: str) -> bool:
    """Whether a process is of another machine, or of a time before this one was last started."""
    return process.rpartition(":")[0] != this_process().rpartition(":")[0]


def is_gone(process: str) -> bool:
    """Whether a process, named by its own `this_process`, has ended; false when it is of another machine."""
    if is_elsewhere(process):
        return False
    try:
        return psutil.Process(int(process.rpartition(":")[2])).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
