"""The supervisor of one node: it starts the ranks, watches them, and acts on how they end.

What follows from an outcome is decided in `outcome.py`, what a hang is in `mizzen/hang.py`, and how supervisors find
each other in `rendezvous.py`.
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
from typing import Final

from mizzen.errors import LaunchError
from mizzen.hang import RankState, find_hang
from mizzen.launcher.hosts import find_devices, numa_nodes, numactl, physical, shares
from mizzen.launcher.job import Job, inherited, rank_environment, with_drop_in
from mizzen.launcher.outcome import Failure, Outcome, decide, record_outcome, root_cause
from mizzen.launcher.output import ProcessOutput, open_log, say
from mizzen.launcher.rendezvous import JobStopped, Node, Rendezvous
from mizzen.launcher.rendezvous_state import Assignment, RendezvousStatus
from mizzen.launcher.signals import SAVED, UNSAVED, Interrupted, StopSignals
from mizzen.launcher.workers import TICK, CleanupProcess, WorkerGroup, WorkerSpec
from mizzen.log import LEVELS

STATUS_INTERVAL: Final = 0.25
"""Seconds between two questions to the other nodes, and two readings of the records of the ranks."""
SECOND_CAUSE: Final = 4.0
"""How long a rank's error that tells of another rank waits for that rank to end."""
PASS_ON: Final = 0.3
"""Seconds before a signal is passed on: Slurm has sent it to the ranks as well, and they may be about to leave."""
RANKS_APART: Final = 30.0
"""Seconds that ranks may differ in when they end together."""
NODES_APART: Final = 3.0
"""Seconds that nodes may differ in when they end together."""
HUNG: Final = 124
"""The exit code of a job that hung; `timeout` has the same."""


Check = Callable[[WorkerGroup], Outcome | None]


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
    """The supervisor of one node, attempt after attempt, to the end of the job."""

    def __init__(
        self,
        job: Job,
        node: Node,
        rendezvous: Rendezvous,
        *,
        cleanup: CleanupProcess,
        signals: StopSignals,
        folder: Path,
        env: Mapping[str, str],
    ) -> None:
        self._job, self._node, self._rendezvous = job, node, rendezvous
        self._cleanup, self._signals, self._folder, self._env = cleanup, signals, folder, env
        self._stop: Stop | None = None
        self._next_status = 0.0
        self._failed_since: float | None = None
        self._saved_since: float | None = None
        self._regroup_by: float | None = None
        self._gone_since: float | None = None
        self._has_finished, self._hang_checks = False, 0
        self._status = RendezvousStatus()

    def run(self) -> int:
        """Attempt after attempt, until one of them ends the job; the exit code."""
        has_saved = False
        while True:
            assignment = self._join()
            if assignment is None:
                return self._leave(
                    SAVED if has_saved else UNSAVED, "" if has_saved else "stopped before the ranks started"
                )
            # A folder for each attempt: a record that a dead rank has left must not speak for a living one.
            folder = self._folder / f"attempt-{assignment.attempt}"
            folder.mkdir()
            workers = WorkerGroup(self._node.host.name, folder, self._cleanup)
            outcome = Outcome("lost", reason="the supervisor failed")
            try:
                workers.start(self._specs(assignment, folder), self._job.folder)
                outcome = self._watch(workers)
            finally:
                at_once = outcome.failure is not None and outcome.failure.status == HUNG
                workers.end(signal.SIGKILL if at_once or self._signals.ends_at_once else signal.SIGTERM)
            action = decide(
                outcome,
                max_restarts=self._job.supervision.max_restarts,
                was_asked=bool(self._signals.received),
                is_elastic=self._job.is_elastic,
            )
            record_outcome(folder, self._node.host.name, action)
            if action.code is not None:
                return self._leave(action.code, action.words, action.trace)
            if action.words and self._is_told(logging.WARNING):
                say(action.words, before=action.trace)
            has_saved = outcome.kind == "saved"
            self._failed_since = self._saved_since = self._regroup_by = self._gone_since = None
            self._has_finished, self._hang_checks = False, 0
            self._status = RendezvousStatus()

    def _is_told(self, level: int) -> bool:
        """Whether what happens is worth a line; how a job ends always is."""
        return level >= LEVELS[self._job.supervision.level]

    def _note(self, text: str) -> None:
        if self._is_told(logging.INFO):
            say(text)

    def _join(self) -> Assignment | None:
        if self._signals.received:
            return None
        try:
            self._signals.is_joining = True
            assignment = self._rendezvous.join()
            self._signals.is_joining = False
        except (Interrupted, JobStopped):
            return None
        except LaunchError:
            if self._signals.received:
                return None
            raise
        finally:
            self._signals.is_joining = False
        return assignment

    def _leave(self, code: int, words: str, trace: str = "") -> int:
        self._rendezvous.leave(words, was_asked=code in (SAVED, UNSAVED))
        if words:
            say(words, before=trace, mark=self._job.mark)
        return code

    # Starting

    def _specs(self, assignment: Assignment, folder: Path) -> list[WorkerSpec]:
        job, host = self._job, self._node.host
        ranks = len(host.slots)
        cores = self._cores(ranks)
        allowed = len(os.sched_getaffinity(0))
        devices, given = find_devices({**self._env, **job.environment}), inherited(self._env)
        specs = []
        for local_rank in range(ranks):
            threads = len(cores[local_rank]) if cores else max(1, allowed // ranks)
            own = rank_environment(job, host, assignment, local_rank, folder=folder, devices=devices, threads=threads)
            if "OMP_NUM_THREADS" in given and not cores:
                own["OMP_NUM_THREADS"] = job.environment.get("OMP_NUM_THREADS", given["OMP_NUM_THREADS"])
            if job.drop_in:
                own |= with_drop_in({**given, **own})
            binding = numactl(cores[local_rank], numa_nodes()) if cores else ()
            specs.append(
                WorkerSpec(
                    assignment.first_rank + local_rank,
                    local_rank,
                    (*binding, *job.program.words(job.python, local_rank)),
                    {**given, **own},
                    self._output(assignment, assignment.first_rank + local_rank),
                    is_python=job.program.kind != "executable",
                )
            )
        return specs

    def _cores(self, ranks: int) -> list[tuple[int, ...]]:
        asked = self._job.supervision.cores
        if asked is None:
            return []
        if shutil.which("numactl") is None:
            raise LaunchError(
                "--bind_cores_to_rank needs numactl, which is not installed: install numactl, or leave it out"
            )
        return shares(asked or physical(sorted(os.sched_getaffinity(0))), ranks)

    def _output(self, assignment: Assignment, rank: int) -> ProcessOutput:
        supervision = self._job.supervision
        is_shown = supervision.shown is None or rank in supervision.shown
        is_alone = supervision.shown is not None and len(supervision.shown) == 1
        output = ProcessOutput(
            prefix=f"[rank {rank}] ".encode(),
            is_shown=is_shown,
            is_raw=is_alone,
            file=open_log(Path(self._job.folder) / supervision.logs, rank) if supervision.logs else None,
        )
        output.keep(f"--- attempt {assignment.attempt + 1} ---\n".encode() if assignment.attempt else b"")
        return output

    # Watching

    def _watch(self, workers: WorkerGroup) -> Outcome:
        checks: tuple[Check, ...] = (self._stopped, self._failed, self._saved, self._done)
        slow: tuple[Check, ...] = (self._read_status, self._other_nodes, self._regroup, self._hung)
        try:
            while True:
                time.sleep(TICK)
                is_due = time.monotonic() >= self._next_status
                for check in (*checks, *(slow if is_due else ())):
                    if (outcome := check(workers)) is not None:
                        return outcome
                if is_due:
                    workers.note_memory()
                    self._next_status = time.monotonic() + STATUS_INTERVAL
        except LaunchError as error:
            return Outcome("lost", reason=str(error))

    def _stopped(self, workers: WorkerGroup) -> Outcome | None:
        signals = self._signals
        if not signals.received:
            return None
        if self._stop is None:
            self._stop = self._begin_stop(workers, signals.received[0])
        if self._stop.pass_on_at is not None and time.monotonic() > self._stop.pass_on_at:
            self._stop.pass_on_at = None
            workers.send_signal(self._stop.signal)
        if signals.ends_at_once:
            return Outcome("stopped", signal=signals.received[-1], reason="ended at once; nothing more was saved")
        if workers.have_succeeded and self._stop.done_at is None:
            self._stop.done_at = time.monotonic()
        if self._stop.done_at is not None and time.monotonic() > self._stop.done_at + NODES_APART:
            name = signal.Signals(self._stop.signal).name
            words = f"stopped by {name}: the ranks of this node are done, those of other nodes were not waited for"
            return Outcome("stopped", signal=self._stop.signal, reason=words)
        if time.monotonic() > self._stop.deadline:
            return Outcome(
                "stopped",
                signal=self._stop.signal,
                reason=f"the ranks have not saved within {self._job.supervision.grace:g} s (--grace) and were ended",
            )
        return None

    def _begin_stop(self, workers: WorkerGroup, number: int) -> Stop:
        """Ask ranks that can save to do so; others get the signal itself, which they may know what to do with."""
        can_save = any(record.step >= 0 for _, record in workers.records())
        name, now = signal.Signals(number).name, time.monotonic()
        if can_save:
            workers.ask_to_stop()
            self._rendezvous.request("stop")
            self._note(f"{name}: the ranks save at the end of this step and stop; a second signal ends them at once")
            return Stop(number, now + self._job.supervision.grace)
        self._note(f"{name}: no rank can save yet; they get the signal")
        return Stop(number, now + self._job.supervision.grace, now + PASS_ON, can_save=False)

    def _failed(self, workers: WorkerGroup) -> Outcome | None:
        is_asked = bool(self._signals.received)
        failures = workers.failures(is_asked)
        if not failures or is_asked != bool(self._signals.received):
            return None  # a signal that came in this moment may be why they ended
        if self._stop is not None and not self._stop.can_save:
            words = f"stopped by {signal.Signals(self._stop.signal).name}; nothing could be saved"
            return Outcome("unsaved", reason=words) if workers.have_ended else None
        now = time.monotonic()
        self._failed_since = self._failed_since or now
        found = root_cause(failures)
        if self._status.gone and self._status.failure is None:
            return _without_them(self._status)
        may_come = found.is_secondary and (not workers.have_ended or self._job.max_nodes > 1)
        if self._status.is_in_doubt or (may_come and now - self._failed_since < SECOND_CAUSE):
            return None
        counted = self._rendezvous.report_failure(found)
        if counted is None:
            return None  # a node is gone, and the next status will say which
        return Outcome("failed", counted, is_ours=counted.rank == found.rank)

    def _saved(self, workers: WorkerGroup) -> Outcome | None:
        ended = workers.stopped(bool(self._signals.received))
        if not ended:
            return None
        self._saved_since = self._saved_since or time.monotonic()
        if not workers.have_ended and time.monotonic() - self._saved_since < RANKS_APART:
            return None
        return Outcome("unsaved") if UNSAVED in ended else Outcome("saved")

    def _done(self, workers: WorkerGroup) -> Outcome | None:
        if not workers.have_succeeded:
            return None
        if not self._has_finished:
            self._has_finished = True
            self._rendezvous.report_done()
            self._status = self._rendezvous.status()
        return Outcome("done") if self._status.are_finished else None

    def _read_status(self, workers: WorkerGroup) -> Outcome | None:
        """Another node was asked to stop, or checks for a hang: tell the ranks, or share their states."""
        self._status = self._rendezvous.status()
        if self._status.request == "stop":
            workers.ask_to_stop()
        word, _, check = self._status.request.partition(" ")
        if word == "hang" and int(check) > self._hang_checks:
            self._share_states(workers, int(check))
        return None

    def _other_nodes(self, _: WorkerGroup) -> Outcome | None:
        """Other nodes failed, left or are lost: go on without them where the job may. Ranks that end come first."""
        failure = self._status.failure
        if failure is not None:
            return Outcome("failed", failure, is_ours=False)
        is_ending = self._stop or self._failed_since or self._saved_since or self._regroup_by
        if not (self._status.gone or self._status.is_over) or self._status.are_finished or is_ending:
            return None
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        patience = max(NODES_APART, self._job.supervision.grace) if self._status.request == "stop" else NODES_APART
        if now - self._gone_since < patience:
            return None
        return _without_them(self._status) if self._status.gone else Outcome("changed")

    def _regroup(self, workers: WorkerGroup) -> Outcome | None:
        """Nodes wait to join: ranks that can save do so first, so that no step is lost."""
        if self._regroup_by is None:
            if not self._status.has_changed or self._has_finished:
                return None
            if not any(record.step >= 1 for _, record in workers.records()):
                return Outcome("changed")
            self._note("nodes want to join: the ranks save at the end of this step and start again with them")
            workers.ask_to_stop()
            self._regroup_by = time.monotonic() + self._job.supervision.grace
        return Outcome("changed") if time.monotonic() > self._regroup_by else None

    def _hung(self, workers: WorkerGroup) -> Outcome | None:
        own = self._job.supervision.hang_timeout
        limit = own if own is not None else max((record.hang_timeout for _, record in workers.records()), default=0.0)
        if find_hang(workers.states(), limit) is None:
            return None
        self._rendezvous.request(f"hang {self._hang_checks + 1}")
        everyone = self._share_states(workers, self._hang_checks + 1)
        hang = find_hang(everyone, limit)
        if hang is None:
            return None  # the ranks have moved on, or ended, while their states were gathered
        stacks = "\n".join(f"{state.name}: {state.stack.rstrip()}" for state in everyone)
        blamed = (hang.missing or tuple(everyone))[0]
        failure = Failure(blamed.rank, blamed.host, HUNG, trace=stacks, cause=str(hang), role=blamed.role)
        counted = self._rendezvous.report_failure(failure)
        return None if counted is None else Outcome("failed", counted, is_ours=counted.cause == failure.cause)

    def _share_states(self, workers: WorkerGroup, check: int) -> list[RankState]:
        """The states of all ranks of the job, with their stacks, as of this check for a hang."""
        self._hang_checks = check
        stacks = workers.stacks()
        own = [replace(state, stack=stacks.get(state.rank, "")).as_dict() for state in workers.states()]
        shared = self._rendezvous.share(f"states/{check}", json.dumps(own))
        return [RankState(**state) for text in shared for state in json.loads(text)]


def _without_them(status: RendezvousStatus) -> Outcome:
    return Outcome("changed" if status.are_enough else "lost", reason=status.gone)
