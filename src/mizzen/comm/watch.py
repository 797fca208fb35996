"""Waiting that ends: every wait is sliced, and a rank whose peer has left or gone elsewhere raises a CommError.

A background thread tells the other ranks about once a second where this one is, through the job's store, and reads
where they are only while this rank waits for long. Nothing of this is on the path of a collective that is done within
two seconds. What follows from what was read is decided in `whereabouts.py`.
"""

import atexit
import os
import re
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from mizzen.comm.backend import Group, Handle, Request, Store
from mizzen.comm.whereabouts import NAMED_PEERS, Calls, Case, Sighting, Wait, Whereabouts, absent, verdict
from mizzen.errors import CommError
from mizzen.log import get_logger
from mizzen.progress import get_progress

SLICE: Final = 0.25
"""Seconds between two looks at what is known, of a rank that waits for long; less than that is no wait at all."""
LOST: Final = re.compile("(?i)connection|closed|reset by peer|broken pipe|timed out|socket")
"""Words in torch's errors that mean that a peer is no longer there, as opposed to a wrong argument."""
RECORDS_PER_SECOND: Final = 32
"""How many records of others a waiting rank reads per second: more would drown the store of a large job."""


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


class Count:
    """What this rank has done in one group; `Calls` is what the others are told of it."""

    __slots__ = ("failed", "failure", "finished", "issued", "recent")

    def __init__(self) -> None:
        self.issued = 0
        self.finished = 0
        self.recent: deque[tuple[int, str]] = deque(maxlen=8)
        self.failed = 0
        self.failure = ""

    @property
    def calls(self) -> Calls:
        """A copy for the record."""
        return Calls(self.issued, self.finished, tuple(self.recent), self.failed, self.failure)


class Call:
    """One operation of this rank, from the moment it is issued."""

    __slots__ = ("count", "entered", "group", "number", "request")

    def __init__(self, request: Request, group: Group, count: Count, number: int) -> None:
        self.request = request
        self.group = group
        self.count = count
        self.number = number
        self.entered = time.monotonic()

    @property
    def place(self) -> str:
        """The number and the group in words."""
        return f"call {self.number} of {self.group}" if self.number else f"a message in {self.group}"

    def as_wait(self, rank: int) -> Wait:
        """For the record, and to be judged."""
        peers = tuple(peer for peer in self.request.peers or self.group.ranks if peer != rank)
        on_main = threading.current_thread() is threading.main_thread()
        return Wait(self.group.name, self.number, self.request.title, self.place, peers, on_main)


class Watch:
    """The account of this rank's collectives, what it tells the others and what it knows of them."""

    def __init__(self, rank: int, size: int, store: Store | None, patience: Patience) -> None:
        self.patience = patience
        self._rank = rank
        self._size = size
        self._store = store
        self._process = this_process()
        self._counts: dict[str, Count] = {}
        self._waits: dict[int, Wait] = {}
        self._sightings: dict[int, Sighting] = {}
        self._beats = 0
        self._answers = 0
        self._next_look = 0.0
        self._left = ""
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, request: Request, group: Group) -> Call:
        """Account for an operation that is about to be issued."""
        if self._thread is None and self._store is not None:
            self._start()
        count = self._counts.get(group.name)
        if count is None:
            count = self._counts[group.name] = Count()
        number, title = 0, request.title
        if not request.peers:
            number = count.issued = count.issued + 1
            count.recent.append((number, title))
        get_progress().enter(number, title, group.title)
        return Call(request, group, count, number)

    def wait(self, call: Call, handle: Handle, timeout: float | None = None) -> None:
        """Return when the operation is done; raise a CommError when it has failed or cannot be done any more."""
        limit = timeout or call.group.timeout or self.patience.timeout
        try:
            if not handle.poll(min(SLICE, limit)):
                with get_progress().waiting():
                    self._wait_long(call, handle, limit)
        except CommError:
            raise
        except RuntimeError as error:
            raise self.explain(call, error) from error
        call.count.finished = max(call.count.finished, call.number)

    def _wait_long(self, call: Call, handle: Handle, limit: float) -> None:
        started = time.monotonic() - SLICE
        if handle.poll(max(min(self.patience.look, limit) - SLICE, 0)):
            return
        wait = call.as_wait(self._rank)
        answers, unanswered = self._answers, 0.0
        self._waits[id(call)] = wait
        self._wake.set()
        try:
            while not handle.poll(SLICE):
                # Silence is the sum of slices, not a difference of clocks: whoever was suspended itself accuses nobody.
                unanswered = 0.0 if answers != self._answers else unanswered + SLICE
                answers = self._answers
                waited = time.monotonic() - started
                if reason := self._reason_to_stop(wait, waited, limit, unanswered):
                    handle.abandon()
                    raise self._failure(call, f"waited {waited:.1f} s in {wait.title} ({wait.place})", reason)
        finally:
            del self._waits[id(call)]

    def _reason_to_stop(self, wait: Wait, waited: float, limit: float, unanswered: float) -> str | None:
        if reason := verdict(self._case(wait, self.patience.silence), self._sightings):
            return reason
        if self._store is not None and unanswered > self.patience.silence:
            return (
                f"the job's store has not answered for {unanswered:.0f} s: the process that hosts it (rank 0, unless a "
                "launcher does) has left or is stopped"
            )
        return f"the limit is {limit:g} s; {self._roll_call(wait)}" if waited > limit else None

    def explain(self, call: Call, error: RuntimeError) -> CommError:
        """What went wrong below, in our words, with the rank that caused it if it can be found out."""
        reason = said = first_sentence(error)
        if LOST.search(said):
            reason = f"{self._find_culprit(call) or 'it is not known which rank has left'}. The backend says: {said}"
        waited = time.monotonic() - call.entered
        return self._failure(call, f"failed after {waited:.1f} s in {call.request.title} ({call.place})", reason)

    def refuse(self, call: Call, error: Exception) -> CommError | None:
        """Account for an operation that could not even be issued; an error of ours when a lost peer is the cause."""
        if isinstance(error, RuntimeError) and LOST.search(str(error)):
            return self.explain(call, error)
        self._note_failure(call, f"{type(error).__name__}: {first_sentence(error)}")
        return None

    def _find_culprit(self, call: Call) -> str | None:
        """Look for a peer that has left: its word may come a little after its connection is lost."""
        wait = call.as_wait(self._rank)
        self._waits[id(call)] = wait
        try:
            for _ in range(round(2 * self.patience.look / SLICE)):
                self._wake.set()
                if found := verdict(self._case(wait, 2 * self.patience.beat), self._sightings):
                    return found
                if self._store is None or (self._thread is not None and not self._thread.is_alive()):
                    return "the job's store is gone too, so most likely the process that hosts it has left: rank 0"
                time.sleep(SLICE)
        finally:
            del self._waits[id(call)]
        return None

    def _failure(self, call: Call, what: str, reason: str) -> CommError:
        message = f"rank {self._rank} {what}: {reason}"
        self._note_failure(call, message)
        return CommError(message)

    def _note_failure(self, call: Call, message: str) -> None:
        call.count.failed, call.count.failure = call.number, message[:400]
        self._wake.set()

    def _case(self, wait: Wait, silence: float) -> Case:
        return Case(self._whereabouts(), wait, silence)

    def _roll_call(self, wait: Wait) -> str:
        missing = absent(wait, self._sightings)
        if not wait.number or not missing:
            return "all peers have come, or are not heard of"
        words = []
        for rank in missing[:8]:
            seen = self._sightings.get(rank)
            words.append(
                f"rank {rank} ({seen.whereabouts.place or 'alive'})" if seen else f"rank {rank} (never heard of)"
            )
        return f"{len(missing)} of {len(wait.peers)} peers have not come: {', '.join(words)}"

    def leave(self, reason: str) -> None:
        """Tell the others that this rank takes no further part, and stop telling them anything."""
        atexit.unregister(self._at_exit)
        self._left = reason
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * self.patience.beat)

    def _at_exit(self, pid: int) -> None:
        if os.getpid() == pid:  # a forked child has inherited this handler, but not the rank
            self.leave(_why_this_process_ends())

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="mizzen-watch", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit, os.getpid())

    def _run(self) -> None:
        began = psutil.Process().create_time()
        try:
            while self._publish():
                if self._waits and time.monotonic() >= self._next_look:
                    self._look(began)
                self._answers += 1
                self._wake.wait(self._period)
                self._wake.clear()
        except RuntimeError as error:
            # The host of the store is gone. The thread ends, and whoever waits for long notices the silence.
            get_logger().debug("rank %d can no longer tell the others where it is: %s", self._rank, error)

    def _whereabouts(self) -> Whereabouts:
        record = get_progress().record
        return Whereabouts(
            rank=self._rank,
            process=self._process,
            beat=self._beats,
            written=time.time(),
            step=record.step,
            unit=record.unit,
            phase=record.phase,
            calls={name: count.calls for name, count in list(self._counts.items())},
            waits=tuple(wait for wait in list(self._waits.values()) if len(wait.peers) <= NAMED_PEERS),
            left=self._left,
        )

    def _publish(self) -> bool:
        """Tell the others; false when there is nothing more to tell."""
        self._beats += 1
        whereabouts = self._whereabouts()
        self._live_store.set(_key(self._rank), whereabouts.pack())
        return not whereabouts.left

    def _look(self, began: float) -> None:
        """Read where the peers of all present waits are."""
        peers = {peer for wait in list(self._waits.values()) for peer in wait.peers}
        interval = max(self._period, len(peers) / RECORDS_PER_SECOND)
        for rank in sorted(peers):
            # `get` would wait for a key that is not there yet.
            if not self._live_store.check([_key(rank)]):
                continue
            seen = Whereabouts.unpack(self._live_store.get(_key(rank)))
            if seen.written < began:
                continue  # of an earlier attempt of this job, on the same store
            before = self._sightings.get(rank)
            is_news = before is None or before.whereabouts.beat != seen.beat
            silence = 0.0 if is_news or before is None else before.silence + interval
            self._sightings[rank] = Sighting(seen, silence, gone=is_gone(seen.process))
        self._next_look = time.monotonic() + interval

    @property
    def _live_store(self) -> Store:
        if self._store is None:
            raise AssertionError("the watch runs only where there is a store")
        return self._store

    @property
    def _period(self) -> float:
        # A store serves one job: at 1,024 ranks it gets 256 records a second.
        return max(self.patience.beat, self._size / 256)


def first_sentence(error: BaseException) -> str:
    """What an error says, without the place in the C++ sources that it begins with and the advice that it ends with."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^\]]*\.(cc|cpp|hpp|h):\d+\]\s*", "", line).partition(". ")[0]


def _key(rank: int) -> str:
    return f"whereabouts/{rank}"


def _why_this_process_ends() -> str:
    error = vars(sys).get("last_value")
    if error is None:
        return "its process ended"
    said = str(error).partition("\n")[0][:400]
    return f"its process ended with {type(error).__name__}: {said}"


def this_process() -> str:
    """A name for this process that other processes of the same machine can look up."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        machine = socket.gethostname()
    return f"{machine}:{os.getpid()}"


def is_gone(process: str) -> bool:
    """Whether a process, named by its own `this_process`, has ended; false when it is of another machine."""
    machine, _, pid = process.rpartition(":")
    if machine != this_process().rpartition(":")[0]:
        return False
    try:
        return psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
