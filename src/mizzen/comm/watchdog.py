"""Waiting that ends: every wait is sliced, and a rank whose peer has left or gone elsewhere raises a CommError.

A collective that is done within a moment pays for an entry in the calls of its rank and nothing else. A thread
publishes the status of this rank, and reads those of others while this one waits for long. Only this thread speaks to
the store: one whose host is stopped answers nothing for ever, and no rank may hang in it. What follows from a status is
decided in `rank_status.py`.
"""

import atexit
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from mizzen.comm.backend import Group, Handle, KeyValueStore, Request, Tag
from mizzen.comm.rank_status import (
    NAMED_PEERS,
    Case,
    GroupCalls,
    PeerStatus,
    RankStatus,
    Wait,
    is_gone,
    states,
    this_process,
    torch_call_now,
    verdict,
)
from mizzen.errors import CommError
from mizzen.hang import find_hang
from mizzen.log import get_logger
from mizzen.progress import get_progress
from mizzen.wording import rank_in_role

REMEMBERED: Final = 16
"""Calls of each group whose titles are published: more than a rank may be ahead of another one."""
RECORDS_PER_SECOND: Final = 32
"""How many records of others a waiting rank reads per second: more would drown the store of a large job."""
STARTED: Final = time.time()
"""A record from before this process is of an earlier attempt of the job, where the store has outlived it."""
BEATS_PER_SECOND: Final = 256
"""How many records all ranks of a job together publish per second at most."""
PARTS: Final = 20
"""Of the time that the last word of this rank may take."""
SLICE: Final = 0.25
"""Seconds between two looks at what is known, of a rank that waits for long; less than that is no wait at all."""
LOST: Final = re.compile("(?i)connection|closed|reset by peer|broken pipe|timed out|socket")
"""Words in torch's errors that mean that a peer is no longer there, as opposed to a wrong argument."""


class CallCount:
    """What this rank has done in one group; `GroupCalls` is a copy of it for others."""

    __slots__ = ("failed", "failure", "finished", "issued", "recent")

    def __init__(self) -> None:
        self.issued = 0
        self.finished = 0
        self.recent: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)
        self.failed = 0
        self.failure = ""


class Call:
    """One operation of this rank, from the moment it is issued."""

    __slots__ = ("_count", "entered", "group", "number", "request", "title")

    def __init__(self, request: Request, group: Group, count: CallCount, number: int, title: str) -> None:
        self.request = request
        self.title = title
        self.group = group
        self.number = number
        self.entered = time.monotonic()
        self._count = count

    @property
    def place(self) -> str:
        """The number and the group in words."""
        return f"call {self.number} of {self.group}" if self.number else f"a message in {self.group}"

    def finish(self) -> None:
        """The result is there."""
        if self.number > self._count.finished:
            self._count.finished = self.number

    def fail(self, reason: str) -> None:
        """There will be no result on this rank."""
        self._count.failed, self._count.failure = self.number, reason[:400]


class RankCalls:
    """All that this rank has done and is doing."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.left = ""
        """Why this rank takes no further part, once it does not."""
        self.waits: dict[int, Wait] = {}
        self._counts: dict[str, CallCount] = {}
        self._process = this_process()

    def begin(self, request: Request, group: Group, title: str = "", tag: Tag | None = None) -> Call:
        """Note an operation that is about to be issued; `title` is what others read of it."""
        count = self._counts.get(group.name)
        if count is None:
            count = self._counts[group.name] = CallCount()
        number, title = 0, title or request.title
        if not request.peers:
            number = count.issued = count.issued + 1
            count.recent.append((number, title))
        progress = get_progress()
        if tag is None:
            progress.enter(number, title, group.title)
        else:
            progress.enter(number, title, group.title, step=tag.step, unit=tag.unit, phase=tag.phase)
        return Call(request, group, count, number, title)

    @contextmanager
    def waiting(self, call: Call) -> Iterator[Wait]:
        """Note a wait that has become long."""
        peers = tuple(peer for peer in call.request.peers or call.group.ranks if peer != self.rank)
        on_main = threading.current_thread() is threading.main_thread()
        wait = Wait(call.group.name, call.number, call.title, call.place, peers, on_main)
        self.waits[id(call)] = wait
        try:
            yield wait
        finally:
            del self.waits[id(call)]

    def status(self, beat: int = 0) -> RankStatus:
        """What others are told."""
        record = get_progress().record
        return RankStatus(
            rank=self.rank,
            process=self._process,
            beat=beat,
            written=time.time(),
            step=record.step,
            unit=record.unit,
            phase=record.phase,
            calls={
                name: GroupCalls(count.issued, count.finished, tuple(count.recent), count.failed, count.failure)
                for name, count in list(self._counts.items())
            },
            waits=tuple(wait for wait in list(self.waits.values()) if len(wait.peers) <= NAMED_PEERS),
            left=self.left,
            role=record.role,
        )


class StatusThread:
    """The thread of one rank, from the day it joins to the end of the process."""

    def __init__(self, calls_made: RankCalls, store: KeyValueStore, *, size: int, beat: float) -> None:
        self.beat = beat
        """Seconds between two publications."""
        self.peer_statuses: dict[int, PeerStatus] = {}
        """What was last seen of the peers that were looked for."""
        self.answers = 0
        """Grows whenever the store has answered."""
        self.role_of: Callable[[int], str] = _no_role
        """The role of a rank, which it may not have lived to tell."""
        self._calls_made = calls_made
        self._store = store
        self._size = size
        self._beats = 0
        self._next_look = 0.0
        self._main: Wait | None = None
        """What the main thread waited in at the last look."""
        self._wake = threading.Event()
        self._stale: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, name="mizzen-status", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit, os.getpid())

    def publish_now(self) -> None:
        """Publish, and look where needed, now."""
        self._wake.set()

    def stop(self, reason: str) -> None:
        """Tell the others that this rank takes no further part, and nothing more."""
        atexit.unregister(self._at_exit)
        self._calls_made.left = reason
        self._wake.set()
        # In parts: a machine that was paused must not use up all of the time at once. A thread that comes back from the
        # store while the interpreter ends would be ended inside C++, and the process with it.
        for _ in range(PARTS):
            self._thread.join(2 * self.beat / PARTS)

    @property
    def has_lost_the_store(self) -> bool:
        """Whether the host of the store is gone, and with it all news."""
        return not self._thread.is_alive()

    def _at_exit(self, pid: int) -> None:
        if os.getpid() == pid:  # a forked child has inherited this handler, but not the rank
            self.stop(_why_this_process_ends())

    def _run(self) -> None:
        try:
            while self._publish():
                if self._calls_made.waits and time.monotonic() >= self._next_look:
                    self._look()
                self.answers += 1
                self._wake.wait(self._period)
                self._wake.clear()
        except RuntimeError as error:
            get_logger().debug("rank %d can no longer tell the others where it is: %s", self._calls_made.rank, error)

    @property
    def _period(self) -> float:
        return max(self.beat, self._size / BEATS_PER_SECOND)

    def _publish(self) -> bool:
        """Tell the others; false when there is nothing more to tell."""
        self._beats += 1
        status = replace(self._calls_made.status(self._beats), torch_call=torch_call_now())
        self._store.set(_key(status.rank), status.pack())
        return not status.left

    def _look(self) -> None:
        """Read where the peers of all present waits are."""
        waits = list(self._calls_made.waits.values())
        peers = {peer for wait in waits for peer in wait.peers}
        main = next((wait for wait in waits if wait.on_main_thread), None)
        interval = max(self._period, len(peers) / RECORDS_PER_SECOND)
        for rank in sorted(peers):
            # `get` would wait for a key that is not there yet.
            if not self._store.check([_key(rank)]):
                continue
            seen = RankStatus.unpack(self._store.get(_key(rank)))
            seen = seen if seen.role else replace(seen, role=self.role_of(rank))
            if seen.written < STARTED and self._stale.setdefault(rank, seen.beat) == seen.beat:
                continue  # unless it changes: then only the clocks of the two hosts differ
            before = self.peer_statuses.get(rank)
            # Silence is counted in looks, not by the clock: who was suspended itself must not accuse the others.
            silent = before is not None and before.status.beat == seen.beat
            silence = before.silence + interval if before is not None and silent else 0.0
            lasts = seen.torch_call is not None and main is not None and main is self._main
            is_same = before is not None and lasts and before.status.torch_call == seen.torch_call
            lasting = before.lasting + (not silent) if before is not None and is_same else int(lasts)
            self.peer_statuses[rank] = PeerStatus(seen, silence, gone=is_gone(seen.process), lasting=lasting)
        self._main, self._next_look = main, time.monotonic() + interval


def _no_role(rank: int) -> str:
    return ""


def _key(rank: int) -> str:
    return f"status/{rank}"


def _why_this_process_ends() -> str:
    error = vars(sys).get("last_value")
    if error is None:
        return "its process ended"
    said = str(error).partition("\n")[0][:400]
    return f"its process ended with {type(error).__name__}: {said}"


@dataclass(frozen=True, slots=True)
class Patience:
    """How long this rank waits for others, in seconds."""

    timeout: float = 600.0
    """The longest that a collective may take."""
    look: float = 2.0
    """A wait of this length makes the rank look where its peers are."""
    silence: float = 30.0
    """A peer that has published nothing for so long, while others wait for it, is taken for dead.

    Not shorter by default: a peer that holds the interpreter's lock for long (a large unpickling) is silent as well.
    A peer that was killed on this host, or that ended, is found at the first look.
    """
    beat: float = 1.0
    """The time between two publications."""


class Watchdog:
    """Every wait of this rank goes through here."""

    def __init__(self, rank: int, size: int, store: KeyValueStore | None, patience: Patience) -> None:
        self._patience = patience
        self._calls_made = RankCalls(rank)
        self._status_thread = (
            StatusThread(self._calls_made, store, size=size, beat=patience.beat) if store is not None else None
        )

    @property
    def patience(self) -> Patience:
        """How long this rank waits."""
        return self._patience

    @patience.setter
    def patience(self, patience: Patience) -> None:
        self._patience = patience
        if self._status_thread is not None:
            self._status_thread.beat = patience.beat
            self._status_thread.publish_now()

    def know_roles(self, role_of: Callable[[int], str]) -> None:
        """Let peers be named with their roles, also those that end before they have told theirs."""
        if self._status_thread is not None:
            self._status_thread.role_of = role_of

    def begin(self, request: Request, group: Group, title: str = "", tag: Tag | None = None) -> Call:
        """Note an operation that is about to be issued."""
        return self._calls_made.begin(request, group, title, tag)

    def wait(self, call: Call, handle: Handle, timeout: float | None = None) -> None:
        """Return when the operation is done; raise a CommError when it has failed or cannot be done any more."""
        self.wait_for_part(call, handle, timeout)
        call.finish()

    def wait_for_part(self, call: Call, handle: Handle, timeout: float | None = None) -> None:
        """Wait for something that comes before the end of the operation, such as the comparison of sizes."""
        limit = timeout or call.group.timeout or self._patience.timeout
        try:
            if not handle.poll(SLICE if limit > SLICE else limit):
                with get_progress().waiting():
                    self._wait_long(call, handle, limit)
        except CommError:
            raise
        except RuntimeError as error:
            raise self.explain(call, error) from error

    def _wait_long(self, call: Call, handle: Handle, limit: float) -> None:
        started = time.monotonic() - SLICE
        if handle.poll(min(self._patience.look, limit)):
            return
        answers, unanswered = -1, 0.0
        with self._calls_made.waiting(call) as wait:
            self._publish_now()
            while not handle.poll(SLICE):
                if self._status_thread is not None:
                    # A sum of slices, not a difference of clocks: who was suspended itself must not accuse the others.
                    unanswered = unanswered + SLICE if answers == self._status_thread.answers else 0.0
                    answers = self._status_thread.answers
                waited = time.monotonic() - started
                if reason := self._reason_to_stop(wait, waited, limit, unanswered):
                    handle.abandon()
                    raise self._failure(call, f"waited {waited:.1f} s in {wait.title} ({wait.place})", reason)

    def _reason_to_stop(self, wait: Wait, waited: float, limit: float, unanswered: float) -> str | None:
        if reason := self._verdict(wait, self._patience.silence):
            return reason
        if unanswered > self._patience.silence:
            return (
                f"the job's store has not answered for {unanswered:.0f} s: the process that hosts it (rank 0, unless a "
                "launcher does) has left or is stopped"
            )
        # Under a launcher its supervisor asks the same question, with the limit of the configuration.
        own, peers = states(self._calls_made.status(), wait, waited, self._peer_statuses)
        hang = find_hang([own, *peers], limit, first_step=-1)
        if hang is None:
            return None
        who = f"{len(hang.missing)} of {len(peers)} peers have not come: {hang.peers_in_words}"
        return f"the limit is {limit:g} s; {who if hang.missing else 'all peers have come, or are not heard of'}"

    def _verdict(self, wait: Wait, silence: float) -> str | None:
        return verdict(Case(self._calls_made.status(), wait, silence), self._peer_statuses)

    @property
    def _peer_statuses(self) -> Mapping[int, PeerStatus]:
        return self._status_thread.peer_statuses if self._status_thread is not None else {}

    def refuse(self, call: Call, error: Exception) -> CommError | None:
        """Note an operation that could not even be issued; an error of ours when a lost peer is the cause."""
        if isinstance(error, RuntimeError) and LOST.search(str(error)):
            return self.explain(call, error)
        call.fail(f"{type(error).__name__}: {first_sentence(error)}")
        self._publish_now()
        return None

    def explain(self, call: Call, error: RuntimeError) -> CommError:
        """What went wrong below, in our words, with the rank that caused it if it can be found out."""
        reason = said = first_sentence(error)
        if LOST.search(said):
            reason = f"{self._find_culprit(call) or 'it is not known which rank has left'}. The backend says: {said}"
        waited = time.monotonic() - call.entered
        return self._failure(call, f"failed after {waited:.1f} s in {call.title} ({call.place})", reason)

    def _find_culprit(self, call: Call) -> str | None:
        """Look for a peer that has left: its word may come a little after its connection is lost."""
        if self._status_thread is None:
            return None
        with self._calls_made.waiting(call) as wait:
            for _ in range(round(2 * self._patience.look / SLICE)):
                self._publish_now()
                time.sleep(SLICE)
                if found := self._verdict(wait, 2 * self._patience.beat):
                    return found
                if self._status_thread.has_lost_the_store:
                    return "the job's store is gone too, so most likely the process that hosts it has left: rank 0"
        return None

    def _failure(self, call: Call, what: str, reason: str) -> CommError:
        message = f"{rank_in_role(self._calls_made.rank, get_progress().record.role)} {what}: {reason}"
        call.fail(message)
        self._publish_now()
        return CommError(message)

    def _publish_now(self) -> None:
        if self._status_thread is not None:
            self._status_thread.publish_now()

    def leave(self, reason: str) -> None:
        """Tell the others that this rank takes no further part."""
        if self._status_thread is not None:
            self._status_thread.stop(reason)


def first_sentence(error: BaseException) -> str:
    """What an error says, without the place in the C++ sources that it begins with and the advice that it ends with."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^\]]*\.(cc|cpp|hpp|h):\d+\]\s*", "", line).partition(". ")[0]
