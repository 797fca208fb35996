"""The account that a rank keeps of its own collectives: how many it has issued in each group, and where it waits.

It is kept on every collective, so it is short. What is told to others of it is a `Whereabouts`.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from mizzen.comm.backend import Group, Request
from mizzen.comm.tags import Tag
from mizzen.comm.whereabouts import NAMED_PEERS, Calls, Wait, Whereabouts
from mizzen.progress import get_progress

REMEMBERED: Final = 16
"""Calls of each group whose titles are published: more than a rank may be ahead of another one."""


class Count:
    """What this rank has done in one group; `Calls` is a copy of it for others."""

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

    def __init__(self, request: Request, group: Group, count: Count, number: int, title: str) -> None:
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


class Account:
    """All that this rank has done and is doing."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.left = ""
        """Why this rank takes no further part, once it does not."""
        self.waits: dict[int, Wait] = {}
        self._counts: dict[str, Count] = {}
        self._process = this_process()

    def begin(self, request: Request, group: Group, title: str = "", tag: Tag | None = None) -> Call:
        """Account for an operation that is about to be issued; `title` is what others read of it."""
        count = self._counts.get(group.name)
        if count is None:
            count = self._counts[group.name] = Count()
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
        """Account for a wait that has become long."""
        peers = tuple(peer for peer in call.request.peers or call.group.ranks if peer != self.rank)
        on_main = threading.current_thread() is threading.main_thread()
        wait = Wait(call.group.name, call.number, call.title, call.place, peers, on_main)
        self.waits[id(call)] = wait
        try:
            yield wait
        finally:
            del self.waits[id(call)]

    def whereabouts(self, beat: int = 0) -> Whereabouts:
        """What others are told."""
        record = get_progress().record
        return Whereabouts(
            rank=self.rank,
            process=self._process,
            beat=beat,
            written=time.time(),
            step=record.step,
            unit=record.unit,
            phase=record.phase,
            calls={
                name: Calls(count.issued, count.finished, tuple(count.recent), count.failed, count.failure)
                for name, count in list(self._counts.items())
            },
            waits=tuple(wait for wait in list(self.waits.values()) if len(wait.peers) <= NAMED_PEERS),
            left=self.left,
        )


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
