"""A save that goes on beside training: one at a time, on copies, its error raised at the next step."""

import threading
import time
from collections.abc import Callable
from typing import Literal

from mizzen.errors import CheckpointError, MizzenError
from mizzen.log import get_logger


class Background:
    """The thread of at most one save. The process does not end before it has."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def make_room(self, policy: Literal["wait", "refuse"]) -> None:
        """Come to the end of the save before, or refuse another; its error is raised here too."""
        if self.is_busy and policy == "refuse":
            raise CheckpointError(
                "a save is still being written, and checkpoint.async_policy is 'refuse': save less often, or let the "
                "second save wait with 'wait'"
            )
        self.wait()

    def start(self, do: Callable[[], None]) -> None:
        """Let something go on beside training."""
        self._thread = threading.Thread(target=self._run, args=(do,), name="mizzen-save", daemon=False)
        self._thread.start()

    def _run(self, do: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            do()
        except (MizzenError, OSError, RuntimeError) as error:
            get_logger().error("a save beside training failed after %.1f s: %s", time.perf_counter() - started, error)
            self._error = error

    def wait(self) -> None:
        """Wait for the save under way, if there is one, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.surface()

    def surface(self) -> None:
        """Raise the error of a save that has failed, once."""
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"the last checkpoint was not saved: {error}") from error
