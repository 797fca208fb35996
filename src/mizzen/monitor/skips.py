"""Steps that were due and not taken are always said, with the reason. Deciding that one is skipped is the engine's."""

from typing import Final

from mizzen.log import get_logger
from mizzen.monitor.report import Observer, StepReport
from mizzen.monitor.screen import Screen

SAID_ONE_BY_ONE: Final = 10
SAID_AFTERWARDS: Final = 100


class SkippedSteps(Observer):
    """A warning for each of the first ten, and then for every hundredth, with their number."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._count = 0

    def on_step(self, report: StepReport) -> None:
        """Warn if this step was skipped."""
        if not report.skipped:
            return
        self._count += 1
        if self._count > SAID_ONE_BY_ONE and self._count % SAID_AFTERWARDS:
            return
        text = f"skipped {report.reason}; {report.skipped_steps} skipped so far"
        if report.loss_scale != 1:
            text += f", loss scale {report.loss_scale:g}"
        if self._count == SAID_ONE_BY_ONE:
            text += f"; from here on only every {SAID_AFTERWARDS}th is said"
        self._screen.erase()
        get_logger().warning(text)

    def close(self) -> None:
        """Nothing is held back."""
