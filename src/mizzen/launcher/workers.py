"""The ranks of one node in one attempt, as processes: start them, watch them, end them and all that they started.

The cleanup process ends and removes what is left when a supervisor is killed.

[Note: who belongs to a rank]
A rank is the head of a process group, but a child may make a session of its own and be nobody's child any more, as
daemons do. It still has the environment it was started with, and there the folder of the ranks' records, which no other
job has. What has neither the group nor the folder cannot be found.

[Note: who cleans up after whom]
A rank dies with its supervisor by the kernel's parent-death signal, but the processes that the rank has started do not.
Every rank is the head of a process group, and the cleanup process knows the groups. It holds one end of a pipe; when
the other end is closed, for whatever reason, it ends what is left of the ranks' processes and removes the job's folder.
"""

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from mizzen.errors import LaunchError
from mizzen.hang import RankState
from mizzen.launcher.outcome import Failure, last_words
from mizzen.launcher.output import PipeReader, ProcessOutput
from mizzen.launcher.signals import SAVED, UNSAVED
from mizzen.progress import STACKS, Progress, Record, record_path, stacks_path

CLEANUP: Final = "mizzen-cleanup"
"""The name of a cleanup process: that of a job which a rank has started ends by itself, when it is done."""
RESOURCE_TRACKER: Final = b"multiprocessing.resource_tracker"
"""Python's own cleaner of shared memory, which ends by itself as well."""
PATIENCE: Final = 2.0
"""Seconds that cleaners get, and processes that are killed and do not go."""
END_TICK: Final = 0.005
SHARED_MEMORY: Final = Path("/dev/shm")
PARENT_DEATH: Final = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
SET_NAME: Final = 15
"""PR_SET_NAME of prctl(2)."""


def end_processes(groups: Iterable[int], folders: Iterable[Path]) -> None:
    """Kill these process groups and whatever carries one of the folders; remove what they have left in memory."""
    groups, marks, seen = set(groups), tuple(f"MIZZEN_PROGRESS={folder}".encode() for folder in folders), set[int]()
    until = time.monotonic() + PATIENCE
    while (found := dict(_find(groups, marks))) and time.monotonic() < until:
        seen |= set(found)
        for pid in (pid for pid, cleans_up in found.items() if not cleans_up):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(END_TICK)
    for group in groups:
        signal_group(group, signal.SIGKILL)
    for pid in seen | groups:
        # What torch has left of a dead process in shared memory carries the number of the process.
        for path in SHARED_MEMORY.glob(f"torch_{pid}_*"):
            path.unlink(missing_ok=True)


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; false when there is none."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _find(groups: set[int], marks: tuple[bytes, ...]) -> Iterator[tuple[int, bool]]:
    """The number of each process that lives, and whether it only cleans up after others."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            name, _, rest = (path / "stat").read_text(errors="replace").rpartition(")")
            state, _, group = rest.split()[:3]
            if state in "ZX" or not (int(group) in groups or _has_mark(path, marks)):
                continue
            cleans_up = name.endswith(f"({CLEANUP}") or RESOURCE_TRACKER in (path / "cmdline").read_bytes()
            yield int(path.name), cleans_up


def _has_mark(path: Path, marks: tuple[bytes, ...]) -> bool:
    """Whether a process was started with one of the folders, or one inside of it, in its environment."""
    variables = (path / "environ").read_bytes().split(b"\0")
    return any(one == mark or one.startswith(mark + b"/") for one in variables for mark in marks)


def dies_with_parent(signal_number: int = signal.SIGKILL) -> Callable[[], None]:
    """What a child calls before it runs its program, so that the kernel ends it when the thread that made it ends."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    # PyDLL keeps the interpreter's lock: nothing else of this process may run in a child that was just forked.
    prctl, parent = ctypes.PyDLL(None).prctl, os.getpid()

    def bind() -> None:
        prctl(PARENT_DEATH, signal_number, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the call
            os.kill(os.getpid(), signal_number)

    return bind


class CleanupProcess:
    """A small process that outlives its supervisor and leaves nothing behind, as its supervisor sees it.

    Make it before there are threads: it forks.
    """

    def __init__(self) -> None:
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._write)
            _clean_up(read)
        os.close(read)

    def child_setup(self) -> Callable[[], None]:
        """What a new rank calls before it runs its program: it ends with us, and its group is known here."""
        bind = dies_with_parent()

        def tell() -> None:
            bind()
            self._tell(f"group {os.getpid()}")

        return tell

    def forget(self, group: int) -> None:
        """The group is empty; its number may come to belong to somebody else."""
        self._tell(f"gone {group}")

    def remove(self, path: Path) -> None:
        """Remove this folder, or file, at the end."""
        self._tell(f"folder {path}")

    def _tell(self, line: str) -> None:
        with suppress(BrokenPipeError):
            os.write(self._write, f"{line}\n".encode())

    def close(self) -> None:
        """Let it clean up now, and wait until it has."""
        os.close(self._write)
        os.waitpid(self._pid, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _clean_up(read: int) -> None:
    """Everything that the cleanup process does; it never returns."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.setsid()
    if sys.platform.startswith("linux"):
        ctypes.PyDLL(None).prctl(SET_NAME, CLEANUP.encode(), 0, 0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    groups: dict[int, None] = {}
    folders: list[str] = []
    with os.fdopen(read, encoding="utf8") as lines:
        for line in lines:
            word, _, rest = line.rstrip("\n").partition(" ")
            if word == "group":
                groups[int(rest)] = None
            elif word == "gone":
                groups.pop(int(rest), None)
            elif word == "folder":
                folders.append(rest)
    end_processes(groups, map(Path, folders))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            os.unlink(folder)
    os._exit(0)


KILL_AFTER: Final = 3.0
"""Seconds between asking a rank to end and ending it."""
TICK: Final = 0.02
PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How one rank is to be started."""

    rank: int
    local_rank: int
    words: tuple[str, ...]
    environment: dict[str, str]
    output: ProcessOutput
    is_python: bool = True


@dataclass(slots=True)
class Worker:
    """One rank as a process of this supervisor."""

    spec: WorkerSpec
    process: "subprocess.Popen[bytes]"
    resident: int = 0

    @property
    def status(self) -> int | None:
        """How it ended; None while it runs."""
        return self.process.poll()


@dataclass(slots=True)
class WorkerGroup:
    """All ranks of this node in one attempt."""

    host: str
    folder: Path
    cleanup: CleanupProcess
    workers: list[Worker] = field(default_factory=list)
    pipes: PipeReader = field(default_factory=PipeReader)

    def start(self, specs: Sequence[WorkerSpec], folder: str) -> None:
        """Start every rank. The thread that calls this is the one whose end ends them."""
        bind = self.cleanup.child_setup()

        def prepare() -> None:
            bind()
            signal.signal(STACKS, signal.SIG_IGN)  # a rank that answers not yet, or no more, must outlive the question

        for spec in specs:
            try:
                process = subprocess.Popen(
                    spec.words,
                    env=spec.environment,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    start_new_session=True,
                    preexec_fn=prepare,
                )
            except OSError as error:
                self.end(signal.SIGKILL)
                size = f" ({_length_in_words(spec)})" if error.errno == errno.E2BIG else ""
                raise LaunchError(
                    f"{spec.words[0]} cannot be started in {folder} on {self.host}: {error}{size}"
                ) from error
            self.workers.append(Worker(spec, process))
            self.pipes.add(process, spec.output)
        self.pipes.start()

    @property
    def have_succeeded(self) -> bool:
        """Whether every rank has ended well."""
        return all(worker.status == 0 for worker in self.workers)

    @property
    def have_ended(self) -> bool:
        """Whether every rank has ended."""
        return all(worker.status is not None for worker in self.workers)

    def stopped(self, is_asked: bool) -> list[int]:
        """The exit codes of ranks that have stopped because they were asked; `is_asked` says that all of them were.

        A script may leave with the same codes for reasons of its own, and has then failed.
        """
        return [worker.process.returncode for worker in self.workers if self._has_stopped(worker, is_asked)]

    def _has_stopped(self, worker: Worker, is_asked: bool) -> bool:
        is_stop = worker.status in (SAVED, UNSAVED)
        return is_stop and (is_asked or Progress.was_asked_to_stop(self._record(worker)))

    def failures(self, is_asked: bool) -> list[Failure]:
        """Every rank that has ended otherwise than well or because it was asked to."""
        ended = [worker for worker in self.workers if worker.status not in (None, 0)]
        failed = [worker for worker in ended if not self._has_stopped(worker, is_asked)]
        if failed:
            self.pipes.drain()  # a traceback may still be in the pipe
        failures = []
        for worker in failed:
            spec, status = worker.spec, worker.process.returncode
            text = spec.output.error_tail.decode(errors="replace")
            words = last_words(text, status, is_python=spec.is_python, is_shown=spec.output.is_shown)
            record = Progress.read(self._record(worker))
            role = record.role if record is not None else ""
            failures.append(Failure(spec.rank, self.host, status, words, worker.resident, role=role))
        return failures

    def note_memory(self) -> None:
        """Note how much memory each rank has now, in case it is killed for it."""
        for worker in self.workers:
            with suppress(OSError, ValueError, IndexError):
                statm = Path(f"/proc/{worker.process.pid}/statm").read_text().split()
                worker.resident = int(statm[1]) * PAGE

    def records(self, *, ended: bool = False) -> list[tuple[Worker, Record]]:
        """Where the ranks are that say it, or where those were that have ended."""
        workers = (worker for worker in self.workers if (worker.status is not None) == ended)
        found = ((worker, Progress.read(self._record(worker))) for worker in workers)
        return [(worker, record) for worker, record in found if record is not None]

    def states(self) -> list[RankState]:
        """Where every rank is that has said so, and where those were that have ended."""
        now = time.monotonic()
        return [
            replace(RankState.of(record, self.host, now, has_ended=has_ended), rank=worker.spec.rank)
            for has_ended in (False, True)
            for worker, record in self.records(ended=has_ended)
        ]

    def ask_to_stop(self) -> None:
        """Ask every rank to save and stop, at the end of a step that they agree on."""
        for worker in self.workers:
            with suppress(OSError):
                Progress.ask_to_stop(self._record(worker))

    def send_signal(self, number: int) -> None:
        """Send a signal to every rank."""
        for worker in self.workers:
            if worker.status is None:
                signal_group(worker.process.pid, number)

    def stacks(self, wait: float = 1.0) -> dict[int, str]:
        """What every rank is doing, by its own account: the stacks of all its threads, by global rank."""
        before = {worker.spec.rank: len(self._written(worker)) for worker, _ in self.records()}
        asked = [worker for worker in self.workers if worker.spec.rank in before]

        def stack(worker: Worker) -> str:
            return self._written(worker)[before.get(worker.spec.rank, 0) :]

        for worker in asked:
            with suppress(ProcessLookupError):
                os.kill(worker.process.pid, STACKS)
        until = time.monotonic() + wait
        while time.monotonic() < until and any(not stack(worker) for worker in asked):
            time.sleep(TICK)
        time.sleep(TICK)  # the last of them may still be writing
        return {worker.spec.rank: _main_thread(stack(worker)) or _state(worker.process.pid) for worker in self.workers}

    def _written(self, worker: Worker) -> str:
        """All stacks that a rank has ever written."""
        with suppress(OSError):
            return stacks_path(self.folder, worker.spec.local_rank).read_text(errors="replace")
        return ""

    def _record(self, worker: Worker) -> Path:
        return record_path(self.folder, worker.spec.local_rank)

    def end(self, number: int = signal.SIGTERM, patience: float = KILL_AFTER) -> None:
        """Ask what still runs to end, wait a little, end it; nothing of what they have started is left."""
        for worker, record in self.records():
            if record.step >= 0:  # it takes a request to end for one to save, and has nothing to tidy up otherwise
                worker.process.kill()
        if number != signal.SIGKILL:
            self.send_signal(number)
            until = time.monotonic() + patience
            while not self.have_ended and time.monotonic() < until:
                time.sleep(TICK)
        end_processes([worker.process.pid for worker in self.workers], [self.folder])
        for worker in self.workers:
            worker.process.wait()
            self.cleanup.forget(worker.process.pid)
        self.pipes.drain()
        for worker in self.workers:
            worker.spec.output.close()


def _length_in_words(spec: WorkerSpec) -> str:
    """How long what a rank is given is, and may be."""
    sizes = [len(os.fsencode(word)) + 1 for word in spec.words]
    sizes += [len(os.fsencode(f"{name}={value}")) + 1 for name, value in spec.environment.items()]
    return (
        f"its arguments and variables have {sum(sizes):,} bytes, the longest of them {max(sizes):,}; this system "
        f"allows {os.sysconf('SC_ARG_MAX'):,} in all and {32 * PAGE:,} for one: put what is long into a file"
    )


def _main_thread(stacks: str) -> str:
    """Of all threads the one that the signal has reached, which is the one that trains."""
    before, mark, after = stacks.partition("Current thread")
    return mark + after.partition("\n\n")[0] if mark else before


def _state(pid: int) -> str:
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return "the process is stopped (SIGSTOP)" if state in "Tt" else "it gives no stack"
    return "it has ended"
