"""A small process that outlives its supervisor and leaves nothing behind: not a process, not a temporary file.

[Note: who cleans up after whom]
A rank dies with its supervisor by the kernel's parent-death signal, but the processes that the rank has started do not.
Every rank is the head of a process group, and the keeper knows the groups. It holds one end of a pipe; when the other
end is closed, for whatever reason, it ends what is left of the ranks' families and removes the job's folder.
"""

import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from mizzen.launcher.family import KEEPER, end_family

PARENT_DEATH: Final = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
NAME: Final = 15
"""PR_SET_NAME, the same."""


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


class Keeper:
    """The supervisor's side of the pipe. Make it before there are threads: it forks."""

    def __init__(self) -> None:
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._write)
            _keep(read)
        os.close(read)

    def binding(self) -> Callable[[], None]:
        """What a new rank calls before it runs its program: it ends with us, and the keeper knows its group."""
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


def _keep(read: int) -> None:
    """Everything the keeper does; it never returns."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.setsid()
    if sys.platform.startswith("linux"):
        ctypes.PyDLL(None).prctl(NAME, KEEPER.encode(), 0, 0, 0)
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
    end_family(groups, map(Path, folders))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            os.unlink(folder)
    os._exit(0)
