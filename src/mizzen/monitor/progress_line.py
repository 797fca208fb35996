"""The line of progress on a terminal, written over as training goes on."""

import atexit
import time
from collections.abc import Callable
from datetime import timedelta

from mizzen.accelerator import Memory
from mizzen.monitor.report import Observer, StepReport
from mizzen.monitor.screen import Screen
from mizzen.monitor.stretch import Stretch, gib


class ProgressLine(Observer):
    """Step, loss, learning rate, speed and memory; the time left where the number of steps is known.

    The loss is read only when the line is drawn: at most once per `interval` seconds, and at the last step.
    """

    def __init__(
        self,
        screen: Screen,
        memory: Callable[[], Memory],
        *,
        interval: float,
        total: int | None,
        has_rate: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._screen = screen
        self._memory = memory
        self._interval = interval
        self._total = total
        self._has_rate = has_rate
        self._clock = clock
        self._next = clock()
        self._stretch = Stretch(is_first=True)
        self._step_seconds: float | None = None
        # Many programs never destroy an engine; their last line should not vanish under the prompt.
        atexit.register(self.close)

    def on_step(self, report: StepReport) -> None:
        """Count the step, and draw the line if it is time."""
        self._stretch.add(report)
        if report.applied and (self._clock() >= self._next or report.step == self._total):
            self._screen.show(self._line(report))
            self._stretch = Stretch()
            self._next = self._clock() + self._interval

    def close(self) -> None:
        """Leave the last line on the screen."""
        atexit.unregister(self.close)
        self._screen.keep()

    def _line(self, report: StepReport) -> str:
        total = f"/{self._total}" if self._total is not None else ""
        parts = [f"[bold]step {report.step}{total}[/]"]
        if (loss := report.loss) is not None:
            parts.append(f"loss [cyan]{loss:.4f}[/]")
        if report.lr:
            parts.append(f"lr {report.lr[0]:.3g}")
        if self._has_rate and (rates := self._stretch.rates()):
            unit, rate = list(rates.items())[-1]  # tokens, where they are known: 80 columns have no room for both
            parts.append(f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s")
        if self._has_rate and (mfu := self._stretch.mfu()) is not None:
            parts.append(f"MFU {mfu:.1%}")
        parts.append(gib(self._memory().allocated))
        if (left := self._seconds_left(report.step)) is not None:
            parts.append(f"[dim]{timedelta(seconds=round(left))} left[/]")
        return "  ".join(parts)

    def _seconds_left(self, step: int) -> float | None:
        latest = self._stretch.step_seconds()
        if latest is None or self._total is None:
            return None
        # The last ten lines or so: neither one slow step nor a slow start should decide.
        before = self._step_seconds if self._step_seconds is not None else latest
        self._step_seconds = 0.9 * before + 0.1 * latest
        return max(0, self._total - step) * self._step_seconds
