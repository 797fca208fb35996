"""Requests to stop: the signals, the exit codes, and what becomes of requests that come too early.

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
"""Signals that ask for a save and a stop."""
HEEDED: Final = (*REQUESTS, signal.SIGHUP)


def is_heeded(number: int) -> bool:
    """Whether a signal is for us: a program under nohup has SIGHUP ignored, and must go on."""
    return number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN


@contextmanager
def leaving() -> Iterator[None]:
    """While nothing has been started, a request is the end, with the code that says that nothing was saved."""
    before = {number: signal.signal(number, _leave) for number in HEEDED if is_heeded(number)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) == _leave:
                signal.signal(number, handler)


def _leave(number: int, _: FrameType | None) -> None:
    os.write(2, f"mizzen: stopped by {signal.Signals(number).name} before the ranks started\n".encode())
    os._exit(UNSAVED)


def hold() -> None:
    """Let requests wait until `release`; they do so through an exec, too."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)


def release() -> None:
    """Take in what has waited."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)
