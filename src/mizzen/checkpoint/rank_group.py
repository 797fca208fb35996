"""What the ranks of a save or a load do together: tell each other things, compare what they were given, and fail alike.

A collective of one rank alone would hang; here it ends as every wait of `comm` does, and says what was called.

[Note: ranks that were given different things]
Folders and tags are often made from a clock, so that ranks differ by a second. The first rank's is then taken, as
`checkpoint.tag_validation` says: with one warning, in silence, or not at all. Whatever else changes what all ranks read
or write together has to be the same on all of them (`refuse_unequal`).
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from mizzen.comm import collectives
from mizzen.errors import CheckpointError, CommError, MizzenError, UsageError
from mizzen.log import get_logger
from mizzen.wording import and_more, rank_list

Result = TypeVar("Result")
Validation = Literal["Warn", "Ignore", "Fail"]
"""What becomes of ranks that were given different tags or folders."""


class RankGroup:
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

    def on_job_group(self) -> "RankGroup":
        """These ranks on the job's own process group, for what they say while a save beside training uses theirs."""
        return RankGroup(self.rank, self.size, node=self.node)

    def all_gather(self, value: Any, call: str) -> list[Any]:
        """What each rank has to say, on all of them."""
        if self.size == 1:
            return [value]
        found = [None] * self.size
        self._do(call, lambda: collectives.all_gather_object(found, value, group=self._group))
        return found

    def gather(self, value: Any, call: str) -> list[Any]:
        """What each rank has to say, on the first; elsewhere an empty list."""
        if self.size == 1:
            return [value]
        found = [None] * self.size if self.is_first else None
        self._do(call, lambda: collectives.gather_object(value, found, dst=0, group=self._group))
        return found or []

    def broadcast(self, value: Any, call: str) -> Any:
        """What the first rank has to say, on all of them."""
        if self.size == 1:
            return value
        box = [value]
        self._do(call, lambda: collectives.broadcast_object_list(box, src=0, group=self._group))
        return box[0]

    def run_on_first(self, do: Callable[[], Result], call: str) -> Result:
        """What the first rank gets from doing something; an error of its own is every rank's."""
        outcome = attempt(do) if self.is_first else (None, None)
        found: Result
        found, failure = self.broadcast(outcome, call)
        if failure is not None:
            raise CheckpointError(failure)
        return found

    def raise_failures(self, failure: str | None, call: str) -> None:
        """Raise on every rank when one has failed, with its words."""
        failures = {rank: words for rank, words in enumerate(self.all_gather(failure, call)) if words}
        if failures:
            raise CheckpointError(in_words(failures))

    def take_first(self, what: str, given: Mapping[int, str], validation: Validation) -> None:
        """Let ranks go on with what the first of them was given, or refuse; all ranks call this with the same."""
        if len(set(given.values())) < 2 or validation == "Ignore":
            return
        words = f"the ranks were given different {what}: {in_words(given)}"
        if validation == "Fail":
            raise CheckpointError(f"{words}; give every rank the same one")
        if self.is_first:
            get_logger().warning("%s; the first rank's is taken", words)

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


def refuse_unequal(given: Sequence[Mapping[str, object]], call: str) -> None:
    """Raise where ranks have made a call with different arguments; `given` are those of each rank, by their names."""
    for name in given[0]:
        values = {rank: str(each[name]) for rank, each in enumerate(given)}
        if len(set(values.values())) > 1:
            words = in_words({rank: value[:200] for rank, value in values.items()})
            raise UsageError(f"{call}: the ranks do not agree on {name}: {words}; give every rank the same")


def place_of(folder: str | os.PathLike[str]) -> str:
    """The name of a folder by which ranks compare it: absolute, and with links followed."""
    return os.path.realpath(folder)


def in_words(failures: Mapping[int, str]) -> str:
    """The first few failures in words; what several ranks say stands there once, with their numbers."""
    ranks: dict[str, list[int]] = {}
    for rank, words in failures.items():
        ranks.setdefault(words, []).append(rank)
    return and_more((f"{rank_list(who)}: {words}" for words, who in ranks.items()), 3, separator="; ")
