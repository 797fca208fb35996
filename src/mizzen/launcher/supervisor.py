"""The supervisor of one node: it starts the ranks, watches them, and acts on how they end. What follows from an ending
is decided in `ending.py`, what a hang is in `hang.py`, how nodes meet in `meeting.py`.
"""

import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Final

from mizzen.errors import LaunchError
from mizzen.launcher.cores import domains, numactl, physical, shares
from mizzen.launcher.crew import TICK, Crew, Order
from mizzen.launcher.devices import find_devices
from mizzen.launcher.drop_in import with_drop_in
from mizzen.launcher.ending import Ending, decide, note_ending
from mizzen.launcher.failure import Failure, first_of
from mizzen.launcher.hang import Sighting, culprits, is_hung, sentence
from mizzen.launcher.job import Job
from mizzen.launcher.keeper import Keeper
from mizzen.launcher.meeting import Meeting, Seat, Stopped, members_of
from mizzen.launcher.output import Outlet, open_log, say
from mizzen.launcher.place import Place, inherited, rank_environment
from mizzen.launcher.rendezvous import News
from mizzen.launcher.stops import HEEDED, SAVED, UNSAVED, is_heeded, release
from mizzen.log import LEVELS

LOOK: Final = 0.25
"""Seconds between two looks at the other nodes and at the records of the ranks."""
SECOND_CAUSE: Final = 4.0
"""How long a rank's error that tells of another rank waits for that rank to end."""
PASS_ON: Final = 0.3
"""Seconds before a signal is passed on: Slurm has sent it to the ranks as well, and they may be about to leave."""
LAST_WORDS: Final = 30.0
"""Seconds that ranks may differ in when they end together."""
TOGETHER: Final = 3.0
"""Seconds that nodes may differ in when they end together."""
HUNG: Final = 124
"""The exit code of a job that hung; `timeout` has the same."""


Check = Callable[[Crew], Ending | None]


class Interrupted(Exception):
    """A signal came while the supervisor waited for other nodes."""


class Signals:
    """What this process was asked for from outside."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.is_joining = False
        for number in filter(is_heeded, HEEDED):
            signal.signal(number, self._receive)
        release()

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)
        if self.is_joining:
            raise Interrupted

    @property
    def ends_at_once(self) -> bool:
        """Whether there is no time to save: a second request, or nobody is there any more."""
        return len(self.received) > 1 or signal.SIGHUP in self.received


@dataclass(slots=True)
class Stop:
    """A request to stop that is being carried out."""

    signal: int
    deadline: float
    pass_on_at: float | None = None
    """When ranks that cannot save get the signal itself."""
    can_save: bool = True
    done_at: float | None = None
    """When all ranks of this node were seen to be done."""


class Supervisor:
    """One node of one job."""

    def __init__(
        self,
        job: Job,
        seat: Seat,
        meeting: Meeting,
        *,
        keeper: Keeper,
        signals: Signals,
        folder: Path,
        env: Mapping[str, str],
    ) -> None:
        self._job, self._seat, self._meeting = job, seat, meeting
        self._keeper, self._signals, self._folder, self._env = keeper, signals, folder, env
        self._stop: Stop | None = None
        self._next_look = 0.0
        self._failed_since: float | None = None
        self._saved_since: float | None = None
        self._regroup_by: float | None = None
        self._gone_since: float | None = None
        self._has_finished, self._looks = False, 0
        self._news = News()

    def run(self) -> int:
        """Attempt after attempt, until one of them ends the job; the exit code."""
        has_saved = False
        while True:
            place = self._join()
            if place is None:
                return self._leave(
                    SAVED if has_saved else UNSAVED, "" if has_saved else "stopped before the ranks started"
                )
            # A folder for each attempt: a record that a dead rank has left must not speak for a living one.
            folder = self._folder / f"attempt-{place.attempt}"
            folder.mkdir()
            crew = Crew(self._seat.host.name, folder, self._keeper)
            ending = Ending("lost", reason="the supervisor failed")
            try:
                crew.start(self._orders(place, folder), self._job.folder)
                ending = self._watch(crew)
            finally:
                at_once = ending.failure is not None and ending.failure.status == HUNG
                crew.end(signal.SIGKILL if at_once or self._signals.ends_at_once else signal.SIGTERM)
            move = decide(
                ending,
                max_restarts=self._job.care.max_restarts,
                was_asked=bool(self._signals.received),
                is_elastic=self._job.is_elastic,
            )
            note_ending(folder, self._seat.host.name, move)
            if move.code is not None:
                return self._leave(move.code, move.words, move.trace)
            if move.words and self._tells(logging.WARNING):
                say(move.words, before=move.trace)
            has_saved = ending.kind == "saved"
            self._failed_since = self._saved_since = self._regroup_by = self._gone_since = None
            self._has_finished, self._looks = False, 0
            self._news = News()

    def _tells(self, level: int) -> bool:
        """Whether what happens is worth a line; how a job ends always is."""
        return level >= LEVELS[self._job.care.level]

    def _note(self, text: str) -> None:
        if self._tells(logging.INFO):
            say(text)

    def _join(self) -> Place | None:
        if self._signals.received:
            return None
        try:
            self._signals.is_joining = True
            place = self._meeting.join()
            self._signals.is_joining = False
        except (Interrupted, Stopped):
            return None
        except LaunchError:
            if self._signals.received:
                return None
            raise
        finally:
            self._signals.is_joining = False
        return place

    def _leave(self, code: int, words: str, trace: str = "") -> int:
        self._meeting.leave(words, was_asked=code in (SAVED, UNSAVED))
        if words:
            say(words, before=trace, mark=self._job.mark)
        return code

    # Starting

    def _orders(self, place: Place, folder: Path) -> list[Order]:
        job, host = self._job, self._seat.host
        ranks = len(host.slots)
        cores = self._cores(ranks)
        allowed = len(os.sched_getaffinity(0))
        devices, given = find_devices({**self._env, **job.environment}), inherited(self._env)
        orders = []
        for local_rank in range(ranks):
            threads = len(cores[local_rank]) if cores else max(1, allowed // ranks)
            own = rank_environment(job, host, place, local_rank, folder=folder, devices=devices, threads=threads)
            if "OMP_NUM_THREADS" in given and not cores:
                own["OMP_NUM_THREADS"] = job.environment.get("OMP_NUM_THREADS", given["OMP_NUM_THREADS"])
            if job.drop_in:
                own |= with_drop_in({**given, **own})
            binding = numactl(cores[local_rank], domains()) if cores else ()
            orders.append(
                Order(
                    place.first_rank + local_rank,
                    local_rank,
                    (*binding, *job.program.words(job.python, local_rank)),
                    {**given, **own},
                    self._outlet(place, place.first_rank + local_rank),
                    is_python=job.program.kind != "executable",
                )
            )
        return orders

    def _cores(self, ranks: int) -> list[tuple[int, ...]]:
        asked = self._job.care.cores
        if asked is None:
            return []
        if shutil.which("numactl") is None:
            raise LaunchError(
                "--bind_cores_to_rank needs numactl, which is not installed: install numactl, or leave it out"
            )
        return shares(asked or physical(sorted(os.sched_getaffinity(0))), ranks)

    def _outlet(self, place: Place, rank: int) -> Outlet:
        care = self._job.care
        is_shown = care.shown is None or rank in care.shown
        is_alone = care.shown is not None and len(care.shown) == 1
        outlet = Outlet(
            prefix=f"[rank {rank}] ".encode(),
            is_shown=is_shown,
            is_raw=is_alone,
            file=open_log(Path(self._job.folder) / care.logs, rank) if care.logs else None,
        )
        outlet.keep(f"--- attempt {place.attempt + 1} ---\n".encode() if place.attempt else b"")
        return outlet

    # Watching

    def _watch(self, crew: Crew) -> Ending:
        checks: tuple[Check, ...] = (self._stopped, self._failed, self._saved, self._done)
        slow: tuple[Check, ...] = (self._hear, self._elsewhere, self._changed, self._hung)
        try:
            while True:
                time.sleep(TICK)
                is_due = time.monotonic() >= self._next_look
                for check in (*checks, *(slow if is_due else ())):
                    if (ending := check(crew)) is not None:
                        return ending
                if is_due:
                    crew.weigh()
                    self._next_look = time.monotonic() + LOOK
        except LaunchError as error:
            return Ending("lost", reason=str(error))

    def _stopped(self, crew: Crew) -> Ending | None:
        signals = self._signals
        if not signals.received:
            return None
        if self._stop is None:
            self._stop = self._begin_stop(crew, signals.received[0])
        if self._stop.pass_on_at is not None and time.monotonic() > self._stop.pass_on_at:
            self._stop.pass_on_at = None
            crew.send(self._stop.signal)
        if signals.ends_at_once:
            return Ending("stopped", signal=signals.received[-1], reason="ended at once; nothing more was saved")
        if crew.is_done and self._stop.done_at is None:
            self._stop.done_at = time.monotonic()
        if self._stop.done_at is not None and time.monotonic() > self._stop.done_at + TOGETHER:
            name = signal.Signals(self._stop.signal).name
            words = f"stopped by {name}: the ranks of this node are done, those of other nodes were not waited for"
            return Ending("stopped", signal=self._stop.signal, reason=words)
        if time.monotonic() > self._stop.deadline:
            return Ending(
                "stopped",
                signal=self._stop.signal,
                reason=f"the ranks have not saved within {self._job.care.grace:g} s (--grace) and were ended",
            )
        return None

    def _begin_stop(self, crew: Crew, number: int) -> Stop:
        """Ask ranks that can save to do so; others get the signal itself, which they may know what to do with."""
        can_save = any(record.step >= 0 for _, record in crew.records())
        name, now = signal.Signals(number).name, time.monotonic()
        if can_save:
            crew.ask_to_stop()
            self._meeting.request("stop")
            self._note(f"{name}: the ranks save at the end of this step and stop; a second signal ends them at once")
            return Stop(number, now + self._job.care.grace)
        self._note(f"{name}: no rank can save yet; they get the signal")
        return Stop(number, now + self._job.care.grace, now + PASS_ON, can_save=False)

    def _failed(self, crew: Crew) -> Ending | None:
        is_asked = bool(self._signals.received)
        failures = crew.failures(is_asked)
        if not failures or is_asked != bool(self._signals.received):
            return None  # a signal that came in this moment may be why they ended
        if self._stop is not None and not self._stop.can_save:
            words = f"stopped by {signal.Signals(self._stop.signal).name}; nothing could be saved"
            return Ending("unsaved", reason=words) if crew.is_over else None
        now = time.monotonic()
        self._failed_since = self._failed_since or now
        found = first_of(failures)
        if self._news.gone and self._news.failure is None:
            return _without_them(self._news)
        may_come = found.is_secondary and (not crew.is_over or self._job.max_nodes > 1)
        if self._news.is_in_doubt or (may_come and now - self._failed_since < SECOND_CAUSE):
            return None
        counted = self._meeting.fail(found)
        if counted is None:
            return None  # a node is gone, and the next news will say which
        return Ending("failed", counted, is_ours=counted.rank == found.rank)

    def _saved(self, crew: Crew) -> Ending | None:
        ended = crew.stopped(bool(self._signals.received))
        if not ended:
            return None
        self._saved_since = self._saved_since or time.monotonic()
        if not crew.is_over and time.monotonic() - self._saved_since < LAST_WORDS:
            return None
        return Ending("unsaved") if UNSAVED in ended else Ending("saved")

    def _done(self, crew: Crew) -> Ending | None:
        if not crew.is_done:
            return None
        if not self._has_finished:
            self._has_finished = True
            self._meeting.finish()
            self._news = self._meeting.news()
        return Ending("done") if self._news.are_finished else None

    def _hear(self, crew: Crew) -> Ending | None:
        """Another node was asked to stop, or looks for a hang: tell our ranks, or say where they are."""
        self._news = self._meeting.news()
        if self._news.request == "stop":
            crew.ask_to_stop()
        word, _, look = self._news.request.partition(" ")
        if word == "hang" and int(look) > self._looks:
            self._share_sightings(crew, int(look))
        return None

    def _elsewhere(self, _: Crew) -> Ending | None:
        """Other nodes failed, left or are lost: go on without them where the job may. Ranks that end come first."""
        failure = self._news.failure
        if failure is not None:
            return Ending("failed", failure, is_ours=False)
        is_ending = self._stop or self._failed_since or self._saved_since or self._regroup_by
        if not (self._news.gone or self._news.is_over) or self._news.are_finished or is_ending:
            return None
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        patience = max(TOGETHER, self._job.care.grace) if self._news.request == "stop" else TOGETHER
        if now - self._gone_since < patience:
            return None
        return _without_them(self._news) if self._news.gone else Ending("changed")

    def _changed(self, crew: Crew) -> Ending | None:
        """Nodes wait to join: ranks that can save do so first, so that no step is lost."""
        if self._regroup_by is None:
            if not self._news.has_changed or self._has_finished:
                return None
            if not any(record.step >= 1 for _, record in crew.records()):
                return Ending("changed")
            self._note("nodes want to join: the ranks save at the end of this step and start again with them")
            crew.ask_to_stop()
            self._regroup_by = time.monotonic() + self._job.care.grace
        return Ending("changed") if time.monotonic() > self._regroup_by else None

    def _hung(self, crew: Crew) -> Ending | None:
        records = crew.records()
        limits = [record.hang_timeout for _, record in records]
        own = self._job.care.hang_timeout
        limit = own if own is not None else max(limits, default=0.0)
        now, host = time.monotonic(), self._seat.host.name
        if not is_hung([Sighting.of(member.order.rank, host, record, now) for member, record in records], limit):
            return None
        self._meeting.request(f"hang {self._looks + 1}")
        everyone = self._share_sightings(crew, self._looks + 1)
        if not is_hung(everyone, limit):
            return None  # they have moved on, or ended, while we looked
        guilty = culprits(everyone) or everyone
        stacks = "\n".join(f"rank {seen.rank}: {seen.stack.rstrip()}" for seen in everyone)
        failure = Failure(guilty[0].rank, guilty[0].host, HUNG, trace=stacks, cause=sentence(everyone))
        counted = self._meeting.fail(failure)
        return None if counted is None else Ending("failed", counted, is_ours=counted.cause == failure.cause)

    def _share_sightings(self, crew: Crew, look: int) -> list[Sighting]:
        self._looks = look
        stacks, now, host = crew.stacks(), time.monotonic(), self._seat.host.name
        seen = [Sighting.of(member.order.rank, host, record, now) for member, record in crew.records()]
        ended = (replace(record, waiting=False, phase="has ended") for _, record in crew.records(ended=True))
        seen += [Sighting.of(record.rank, host, record, now) for record in ended]
        with_stacks = [replace(one, stack=stacks.get(one.rank, "")).as_dict() for one in seen]
        shared = self._meeting.share(f"sightings/{look}", json.dumps(with_stacks))
        return [Sighting(**entry) for entry in members_of(shared)]


def _without_them(news: News) -> Ending:
    return Ending("changed" if news.are_enough else "lost", reason=news.gone)
