"""Requests to stop: which signals ask for one, the exit codes that tell of one, and requests that come too early.

This loads next to nothing, so that it can come first.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

SAVED: Final = 75
"""Exit code of a job that was asked to stop and has saved: start it again and it goes on. (EX_TEMPFAIL)"""
UNSAVED: Final = 76
"""Exit code of a job that was asked to stop when nothing could be saved: in start-up, or without checkpoint.dir."""
REQUESTS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""StopSignals that ask for a save and a stop."""
HANDLED: Final = (*REQUESTS, signal.SIGHUP)
"""Signals that the launcher and its supervisors act on."""


def is_handled(number: int) -> bool:
    """Whether a signal is for us: a program under nohup has SIGHUP ignored, and must go on."""
    return number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """While nothing has been started, a request is the end, with the code that says that nothing was saved."""
    before = {number: signal.signal(number, _leave) for number in HANDLED if is_handled(number)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) == _leave:
                signal.signal(number, handler)


def _leave(number: int, _: FrameType | None) -> None:
    os.write(2, f"mizzen: stopped by {signal.Signals(number).name} before the ranks started\n".encode())
    os._exit(UNSAVED)


def block_signals() -> None:
    """Let requests wait until `unblock_signals`; they do so through an exec, too."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)


def unblock_signals() -> None:
    """Take in what has waited."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)


class Interrupted(Exception):
    """A signal came while the supervisor waited for other nodes."""


class StopSignals:
    """The stop signals that this process has received."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.is_joining = False
        for number in filter(is_handled, HANDLED):
            signal.signal(number, self._receive)
        unblock_signals()

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)
        if self.is_joining:
            raise Interrupted

    @property
    def ends_at_once(self) -> bool:
        """Whether there is no time to save: a second request, or nobody is there any more."""
        return len(self.received) > 1 or signal.SIGHUP in self.received
