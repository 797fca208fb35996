"""A folder for the files of one process, which is removed at its end; what killed processes have left is removed, too.

[Note: whose folder is it]
The name says host, rank and process, for people. Whether the process still lives is told by a lock on the file `owner`:
the system gives it up when the process ends, however that ends, and it holds across containers, in which numbers of
processes mean nothing. A folder without that file is being made or removed at this moment, or a crash came in between;
it counts as left behind when nothing has happened in it for an hour.
"""

import fcntl
import os
import re
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

from mizzen.environment import World, environ
from mizzen.errors import FileError
from mizzen.files import ABANDONED, list_folder, make_folder, perform, remove_folder
from mizzen.log import get_logger, warn_once

OWNER: Final = "owner"
PREFIX: Final = "mizzen-swap-"


class SwapFolder:
    """A new folder below a path, locked for as long as this process lives or until it is closed."""

    def __init__(self, below: str | Path) -> None:
        below = Path(below).absolute()
        make_folder(below)
        remove_stale(below)
        self.path, lock = _make(below)
        self.close = weakref.finalize(self, _remove, self.path, lock, os.getpid())
        """Remove it with all that is in it; it happens at exit, too, and only once."""


def remove_stale(below: Path) -> list[Path]:
    """Remove the swap folders of processes of this host that have ended without doing so; those that went."""
    gone = []
    pattern = re.compile(rf"{PREFIX}{re.escape(_host())}-rank\d+-pid\d+-[0-9a-f]{{8}}")
    for folder in list_folder(below):
        if pattern.fullmatch(folder.name) and (lock := _lock_of_the_dead(folder)) is not None:
            try:
                remove_folder(folder)
                gone.append(folder)
            except FileError as error:
                warn_once(f"a process that was killed has left {folder}, and it cannot be removed: {error}")
            finally:
                os.close(lock)
    if gone:
        get_logger().info("removed what killed processes had left: %s", ", ".join(map(str, gone)))
    return gone


def _lock_of_the_dead(folder: Path) -> int | None:
    """The lock of a folder whose owner does not live any more, as a descriptor; None when it lives."""
    try:
        descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return _without_owner(folder)
    except OSError:
        return None  # another user's
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _without_owner(folder: Path) -> int | None:
    with suppress(OSError):
        if time.time() - folder.stat().st_mtime > ABANDONED:
            return os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    return None


def _make(below: Path) -> tuple[Path, int]:
    """A new folder, and the descriptor that keeps its lock."""
    rank = World.detect(environ()).rank
    while True:
        path = below / f"{PREFIX}{_host()}-rank{rank}-pid{os.getpid()}-{os.urandom(4).hex()}"
        perform("mkdir", path, path.mkdir, 0o700)
        lock = _locked(path / OWNER)
        if os.fstat(lock).st_nlink:
            return path, lock
        os.close(lock)  # another process took the folder for stale before the lock was there


def _locked(owner: Path) -> int:
    """The descriptor of a new file that is locked; where that cannot be, its folder goes again."""
    lock = None
    try:
        lock = perform("open", owner, os.open, owner, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        perform("lock", owner, fcntl.flock, lock, fcntl.LOCK_EX)
    except FileError:
        if lock is not None:
            os.close(lock)
        with suppress(FileError):
            remove_folder(owner.parent)
        raise
    return lock


def _remove(path: Path, lock: int, pid: int) -> None:
    if os.getpid() != pid:
        return  # a fork: the folder is its parent's
    try:
        if path.exists():
            remove_folder(path)
    except FileError as error:
        warn_once(f"the swap folder {path} cannot be removed: {error}")
    finally:
        os.close(lock)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
