"""Logging that knows its rank: rank 0 speaks, the others only from warning upwards. It configures no root logger."""

import logging
import sys
from collections.abc import Iterable
from typing import Final, TextIO

from mizzen.ambient import AMBIENT
from mizzen.environment import World, environ

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
LOGGER: Final = logging.getLogger("mizzen")


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is at the time, so that capture and redirection work."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        raise AttributeError(f"the stream is always sys.stderr, not {value!r}")


def get_logger() -> logging.Logger:
    """The library's logger; the first call gives it a handler unless the application has configured one."""
    if not LOGGER.handlers and not logging.getLogger().handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("mizzen %(levelname)s: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.propagate = False
    return LOGGER


def set_level(level: str | int) -> None:
    """Set the threshold by name (`debug` ... `critical`) or number."""
    get_logger().setLevel(LEVELS[level.lower()] if isinstance(level, str) else level)


def _is_meant_for_this_rank(ranks: Iterable[int] | None) -> bool:
    rank = World.detect(environ()).rank
    return rank == 0 if ranks is None else (-1 in (wanted := set(ranks)) or rank in wanted)


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks only: rank 0 when absent, all of them when -1 is among them."""
    if _is_meant_for_this_rank(ranks):
        get_logger().log(level, message)


def info_once(message: str) -> None:
    """Say something at info level, once per process and on rank 0 only."""
    if message not in AMBIENT.warned and get_logger().isEnabledFor(logging.INFO):
        AMBIENT.warned.add(message)
        log_dist(message)


def warn_once(message: str, *, key: str | None = None) -> None:
    """Warn once per process and key (the message itself when no key is given), on rank 0 only."""
    if (key or message) not in AMBIENT.warned:
        AMBIENT.warned.add(key or message)
        log_dist(message, level=logging.WARNING)


def warn_of(messages: Iterable[str]) -> None:
    """Warn of all that was not yet said in this process, in one line, on rank 0 only."""
    new = [message for message in messages if message not in AMBIENT.warned]
    if new:
        AMBIENT.warned.update(new)
        log_dist("; ".join(new), level=logging.WARNING)


def say(message: str) -> None:
    """Write what the user has asked to see to standard output, on rank 0: no level hides it."""
    if _is_meant_for_this_rank(None):
        sys.stdout.write(f"{message}\n")
