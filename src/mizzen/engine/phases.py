"""Where a step is, and where its time goes: each phase notes itself in the progress record, and is timed when asked."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from mizzen.accelerator import Accelerator, Split, Timer
from mizzen.progress import get_progress

Around = Callable[[str], AbstractContextManager[None]]
"""What goes around a phase, by its name."""


class Phases:
    """The phases of a step: forward, backward, step. Nothing here waits for the device."""

    def __init__(self, accelerator: Accelerator | None, around: Sequence[Around] = ()) -> None:
        self._around = tuple(around)
        self._accelerator = accelerator
        """Set when phases are to be timed."""
        self._timers: dict[str, Timer] = {}
        self._steps: deque[dict[str, Split]] = deque()
        """Those that the device was not through with at the last read."""
        self._progress = get_progress()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Something is going on under this name, from now on."""
        self._progress.at(phase=name)
        return nullcontext() if self._accelerator is None and not self._around else self._measured(name)

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            if self._accelerator is not None:
                if name not in self._timers:
                    self._timers[name] = Timer(self._accelerator)
                stack.enter_context(self._timers[name])
            for around in self._around:
                stack.enter_context(around(name))
            yield

    def at_step(self, step: int) -> None:
        """The run has come to this step."""
        self._progress.at(step=step, phase="between steps")

    def read(self) -> dict[str, float]:
        """A step has ended: seconds per phase of the latest one that the device has finished since the last read."""
        self._steps.append({name: timer.split() for name, timer in self._timers.items()})
        latest: dict[str, float] = {}
        while self._steps:
            seconds = {name: split.seconds() for name, split in self._steps[0].items()}
            if None in seconds.values():
                break
            latest = {name: value for name, value in seconds.items() if value is not None}
            self._steps.popleft()
        return latest
