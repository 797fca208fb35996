"""Every process that ranks have started, and how to end them all.

[Note: who belongs to a rank]
A rank is the head of a process group, but a child may make a session of its own and be nobody's child any more, as
daemons do. It still has the environment it was started with, and there the folder of the ranks' records, which no other
job has. What has neither the group nor the folder cannot be found.
"""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

KEEPER: Final = "mizzen-keeper"
"""The name of a keeper: that of a job which a rank has started ends by itself, when it has cleaned up."""
TRACKER: Final = b"multiprocessing.resource_tracker"
"""Python's own cleaner of shared memory, which ends by itself, too."""
PATIENCE: Final = 2.0
"""Seconds that cleaners get, and processes that are killed and do not go."""
TICK: Final = 0.005
SHARED: Final = Path("/dev/shm")


def end_family(groups: Iterable[int], folders: Iterable[Path]) -> None:
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
        kill_group(group, signal.SIGKILL)
    for pid in seen | groups:
        _sweep_shared_memory(pid)


def kill_group(group: int, number: int) -> bool:
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
            cleans_up = name.endswith(f"({KEEPER}") or TRACKER in (path / "cmdline").read_bytes()
            yield int(path.name), cleans_up


def _has_mark(path: Path, marks: tuple[bytes, ...]) -> bool:
    """Whether a process was started with one of the folders, or one inside of it, in its environment."""
    variables = (path / "environ").read_bytes().split(b"\0")
    return any(one == mark or one.startswith(mark + b"/") for one in variables for mark in marks)


def _sweep_shared_memory(pid: int) -> None:
    """Remove what torch has left of a dead process in shared memory: its files carry the number of the process."""
    if SHARED.is_dir():
        for path in SHARED.glob(f"torch_{pid}_*"):
            path.unlink(missing_ok=True)
