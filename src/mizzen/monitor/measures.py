"""The measures of a step that need nothing but its report and the device.

Names, beside those that the profiler and the communication add:

samples_per_sec, tokens_per_sec                    of all ranks
elapsed_time_ms_forward, _backward, _step          with wall_clock_breakdown, of the latest step that is done
memory_allocated, memory_reserved, memory_peak     bytes of this rank's device
"""

from collections.abc import Callable, Mapping

from mizzen.accelerator import Memory
from mizzen.monitor.report import Meter, StepReport


class Rates(Meter):
    """Samples and tokens per second. The first step is not timed: its seconds include the start of the run."""

    def __init__(self) -> None:
        self._is_first = True

    def read(self, report: StepReport) -> Mapping[str, float]:
        """Those that are known."""
        if self._is_first or report.seconds <= 0:
            self._is_first = False
            return {}
        rates = {"samples_per_sec": report.samples / report.seconds}
        return rates | ({"tokens_per_sec": report.tokens / report.seconds} if report.tokens is not None else {})


class PhaseTimes(Meter):
    """Milliseconds of each phase."""

    def read(self, report: StepReport) -> Mapping[str, float]:
        """Those of the report."""
        return {f"elapsed_time_ms_{phase}": 1e3 * seconds for phase, seconds in report.phases.items()}


class MemoryUse(Meter):
    """What this process uses of its device."""

    def __init__(self, memory: Callable[[], Memory]) -> None:
        self._memory = memory

    def read(self, report: StepReport) -> Mapping[str, float]:
        """At the end of the step."""
        memory = self._memory()
        known = {"memory_allocated": memory.allocated, "memory_reserved": memory.reserved}
        return known if memory.peak is None else known | {"memory_peak": memory.peak}
