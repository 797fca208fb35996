"""What adds up between two optimizer steps, and who holds gradients back meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from mizzen.engine.runner import tokens_in
from mizzen.engine.vote import Tally
from mizzen.errors import UsageError


class Window:
    """The micro-batches since the last step."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.tokens: int | None = None
        """What this rank's inputs showed; None while they showed no tokens."""
        self.steps = 0
        """Calls of `step` that did not update."""
        self._forwards = self._backwards = 0
        self.boundary: bool | None = None
        """The user's word on whether the next step updates; None leaves it to counting."""
        self.held_by: str | None = None
        """The context that keeps gradients on their rank."""

    def add(self, loss: Tensor, *, is_share: bool) -> None:
        """Count one micro-batch of an open loop. Shares of a loss add up to one, however many there are."""
        self._backwards += 1
        is_counted = not is_share or self.tally.loss is None
        self.tally = self.tally.plus(loss.reshape(()), float(is_counted))

    def see(self, batch: Any) -> None:
        """Count a forward, and the tokens of its inputs."""
        self._forwards += 1
        count = tokens_in(batch)
        if count is not None:
            self.tokens = (self.tokens or 0) + count

    @property
    def is_empty(self) -> bool:
        """Whether nothing has happened that belongs to the next step."""
        return not self.steps and self.tally.loss is None

    @property
    def passes(self) -> int:
        """The micro-batches that were seen. One may need several forwards, or several backwards, but not both.

        A bare backward is not seen here, and neither is a forward of the module itself.
        """
        return min(filter(None, (self._forwards, self._backwards)), default=1)

    def forget(self) -> None:
        """Gradients were dropped. How far the step is does not change."""
        self.tally, self.tokens, self._forwards, self._backwards = Tally(), None, 0, 0

    def close(self) -> None:
        """A step was taken or skipped: start again."""
        self.forget()
        self.steps = 0

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Keep gradients where they are."""
        if self.held_by:
            raise UsageError(f"{name}() inside {self.held_by}(): the two do not nest")
        self.held_by = name
        try:
            yield
        finally:
            self.held_by = None
