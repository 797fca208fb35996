"""Every process that ranks have started, how to end them all, and the process that does so when a supervisor is killed.

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
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

CLEANUP: Final = "mizzen-cleanup"
"""The name of a cleanup process: that of a job which a rank has started ends by itself, when it is done."""
RESOURCE_TRACKER: Final = b"multiprocessing.resource_tracker"
"""Python's own cleaner of shared memory, which ends by itself as well."""
PATIENCE: Final = 2.0
"""Seconds that cleaners get, and processes that are killed and do not go."""
TICK: Final = 0.005
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
        time.sleep(TICK)
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
