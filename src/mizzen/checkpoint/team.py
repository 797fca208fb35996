"""What the ranks of a save or a load do together: tell each other things, and fail alike.

A collective of one rank alone would hang; here it ends as every wait of `comm` does, and says what was called.
"""

import socket
from collections.abc import Callable
from typing import Any, TypeVar

from mizzen.comm import collectives
from mizzen.errors import CheckpointError, CommError, MizzenError
from mizzen.log import get_logger

Result = TypeVar("Result")


class Team:
    """All ranks of a job, on a group of their own: training's collectives go on beside a save."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None, node: str | None = None) -> None:
        self.rank = rank
        self.size = size
        self.node = node or socket.gethostname()
        self._group = group

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that commits."""
        return self.rank == 0

    def in_front(self) -> "Team":
        """The same ranks on the job's own group, for what they say while a save beside training uses theirs."""
        return Team(self.rank, self.size, node=self.node)

    def everyone(self, value: Any, call: str) -> list[Any]:
        """What each rank has to say, on all of them."""
        if self.size == 1:
            return [value]
        found = [None] * self.size
        self._do(call, lambda: collectives.all_gather_object(found, value, group=self._group))
        return found

    def first(self, value: Any, call: str) -> list[Any]:
        """What each rank has to say, on the first; elsewhere an empty list."""
        if self.size == 1:
            return [value]
        found = [None] * self.size if self.is_first else None
        self._do(call, lambda: collectives.gather_object(value, found, dst=0, group=self._group))
        return found or []

    def from_first(self, value: Any, call: str) -> Any:
        """What the first rank has to say, on all of them."""
        if self.size == 1:
            return value
        box = [value]
        self._do(call, lambda: collectives.broadcast_object_list(box, src=0, group=self._group))
        return box[0]

    def by_first(self, do: Callable[[], Result], call: str) -> Result:
        """What the first rank gets from doing something; an error of its own is every rank's."""
        outcome = attempt(do) if self.is_first else (None, None)
        found: Result
        found, failure = self.from_first(outcome, call)
        if failure is not None:
            raise CheckpointError(failure)
        return found

    def all_well(self, failure: str | None, call: str) -> None:
        """Raise on every rank when one has failed, with its words."""
        failures = {rank: words for rank, words in enumerate(self.everyone(failure, call)) if words}
        if failures:
            raise CheckpointError(in_words(failures))

    @staticmethod
    def _do(call: str, exchange: Callable[[], None]) -> None:
        try:
            exchange()
        except CommError as error:
            raise CommError(f"{call}: every rank has to make this call, and not all have. {error}") from error


def attempt(do: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """A result, or why there is none: an error on one rank must be told to the others, who would wait for it."""
    try:
        return do(), None
    except MizzenError as error:
        return None, str(error)
    except (OSError, RuntimeError, MemoryError) as error:
        return None, f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001  whatever it is: the others wait for this rank
        get_logger().error("nobody expected this; it is told to all ranks", exc_info=error)
        return None, f"{type(error).__name__}: {error}"


def in_words(failures: dict[int, str]) -> str:
    """The same failure of several ranks once, the first few otherwise."""
    ranks: dict[str, list[int]] = {}
    for rank, words in failures.items():
        ranks.setdefault(words, []).append(rank)
    told = [f"rank {', '.join(map(str, who[:8]))}: {words}" for words, who in list(ranks.items())[:3]]
    if len(ranks) > 3:
        told.append(f"and {len(ranks) - 3} more")
    return "; ".join(told)
