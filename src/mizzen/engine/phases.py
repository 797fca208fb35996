"""Where a step is, and where its time goes: each phase notes itself in the progress record, and is timed when asked."""

from collections.abc import Iterator
from contextlib import contextmanager

from mizzen.accelerator import Accelerator, Timer
from mizzen.progress import get_progress


class Phases:
    """The phases of a step: forward, backward, step. Timing waits for the device once per step, when it is read."""

    def __init__(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator
        """Set when phases are to be timed."""
        self._timers: dict[str, Timer] = {}
        self._progress = get_progress()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Something is going on under this name."""
        self._progress.at(phase=name)
        if self._accelerator is None:
            yield
            return
        if name not in self._timers:
            self._timers[name] = Timer(self._accelerator)
        with self._timers[name]:
            yield

    def at_step(self, step: int) -> None:
        """The run has come to this step."""
        self._progress.at(step=step, phase="between steps")

    def read(self) -> dict[str, float]:
        """Seconds per phase since the last read."""
        return {name: timer.read() for name, timer in self._timers.items()}
