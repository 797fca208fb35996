"""The steps between two lines of progress, added up, and how fast they were."""

from mizzen.monitor.report import StepReport


class Stretch:
    """Steps one after the other. The first step of a run is not timed: its seconds include the start of the run."""

    def __init__(self, *, is_first: bool = False) -> None:
        self._skips_one = is_first
        self._timed_steps = 0
        self._samples = 0
        self._tokens: int | None = 0
        self._seconds = 0.0
        self._phases: dict[str, float] = {}
        self._phased_steps = 0
        self._used = self._known = 0.0
        """Seconds at the device's peak that the model's operations took, and those of the steps that know them."""

    def add(self, report: StepReport) -> None:
        """One more step."""
        self._phased_steps += bool(report.phases)
        for phase, seconds in report.phases.items():
            self._phases[phase] = self._phases.get(phase, 0.0) + seconds
        if self._skips_one:
            self._skips_one = False
            return
        self._timed_steps += 1
        self._samples += report.samples
        self._tokens = None if self._tokens is None or report.tokens is None else self._tokens + report.tokens
        self._seconds += report.seconds
        if (mfu := report.measures.get("mfu")) is not None:
            self._used += mfu * report.seconds
            self._known += report.seconds

    def step_seconds(self) -> float | None:
        """Mean seconds of a step; None before one was timed."""
        return self._seconds / self._timed_steps if self._timed_steps else None

    def rates(self) -> dict[str, float]:
        """Samples and, where all steps showed them, tokens per second; empty before a step was timed."""
        if self._seconds <= 0:
            return {}
        rates = {"samples": self._samples / self._seconds}
        return rates | {"tokens": self._tokens / self._seconds} if self._tokens else rates

    def mfu(self) -> float | None:
        """The share of the device's peak that the model's operations took, in the steps that know it."""
        return self._used / self._known if self._known > 0 else None

    def phases(self) -> dict[str, float]:
        """Mean milliseconds of each phase of a step."""
        return {phase: seconds * 1e3 / self._phased_steps for phase, seconds in self._phases.items()}


def gib(size: float | None) -> str:
    """Bytes for people."""
    return "unknown" if size is None else f"{size / 2**30:.2f} GiB"
