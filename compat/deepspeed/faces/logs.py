"""Messages on some of the ranks, and the levels of a log."""

import json
import logging
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mizzen.environment import World, environ
from mizzen.errors import UsageError
from mizzen.log import LEVELS, get_logger, info_once, set_level, warn_once

log_levels = dict(LEVELS)
logger = get_logger()
log_dist_once = info_once
warning_once = warn_once


class LoggerFactory:
    """Makes loggers that write to standard error."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """One of that name."""
        if name is None:
            raise UsageError("create_logger() needs a name")
        found = logging.getLogger(name)
        found.setLevel(level)
        if not found.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
            found.addHandler(handler)
            found.propagate = False
        return found


def get_log_level_from_string(log_level_str: str) -> int:
    """The number of a level."""
    if log_level_str.lower() not in LEVELS:
        raise UsageError(f"{log_level_str!r} is no level of a log: choose one of {', '.join(LEVELS)}")
    return LEVELS[log_level_str.lower()]


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the threshold by name."""
    level = get_log_level_from_string(log_level_str)
    if custom_logger is None:
        set_level(level)
    else:
        custom_logger.setLevel(level)


def get_current_level() -> int:
    """The threshold."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the threshold is at most this level."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def get_dist_msg(message: Any, ranks: Iterable[int] | None = None) -> str | None:
    """A message with the rank in front of it, on these ranks; None elsewhere, and everywhere without a list."""
    rank, wanted = World.detect(environ()).rank, set(ranks or ())
    return f"[Rank {rank}] {message}" if -1 in wanted or rank in wanted else None


def print_dist(message: Any, ranks: Iterable[int] | None = None) -> None:
    """Print a message on these ranks."""
    if (found := get_dist_msg(message, ranks)) is not None:
        print(found)  # noqa: T201


def print_json_dist(message: Mapping[str, Any], ranks: Iterable[int] | None = None, path: str | None = None) -> None:
    """Write a dict to a file as JSON, on these ranks."""
    if path is None:
        raise UsageError("print_json_dist() needs path=, the file to write")
    if get_dist_msg("", ranks) is not None:
        Path(path).write_text(json.dumps({**message, "rank": World.detect(environ()).rank}), encoding="utf8")


def print_configuration(args: Namespace, name: str) -> None:
    """Log every argument on a line."""
    logger.info("%s:", name)
    for key in sorted(vars(args)):
        logger.info("  %s %s %s", key, "." * (29 - len(key)), vars(args)[key])
