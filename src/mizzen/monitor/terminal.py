"""What rank 0 prints to standard error: progress, breakdowns of time and memory, and skipped steps.

The line of progress is drawn without a thread, without hiding the cursor and without taking over `sys.stderr`, so that
a killed run leaves a sane terminal and bars of the user's own keep working.
"""

import atexit
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from mizzen.accelerator import Memory
from mizzen.config.schema import Config, as_lines, values
from mizzen.environment import World
from mizzen.log import get_logger
from mizzen.monitor.output import OutputGuard
from mizzen.monitor.report import Observer, StepReport
from mizzen.wording import gib

if TYPE_CHECKING:
    from rich.console import Console


class Screen:
    """say() writes a line for good; show() draws the passing line, and keep() or the next say() ends it."""

    def __init__(self) -> None:
        self._guard = OutputGuard("standard error")
        self._is_drawn = False

    @cached_property
    def _console(self) -> "Console":
        from rich.console import Console  # 60 ms that runs without a terminal do not pay

        return Console(stderr=True, highlight=False)

    @property
    def can_redraw(self) -> bool:
        """Whether a line can be written over: standard error is a terminal that knows how."""
        return sys.stderr.isatty() and not self._console.is_dumb_terminal

    def say(self, text: str) -> None:
        """Write a line."""
        self.erase()
        self._write(f"mizzen: {text}\n")

    def show(self, markup: str) -> None:
        """Draw the passing line, in rich's markup, cut to the width of the terminal."""
        self.erase()
        if self._guard.is_open:
            with self._guard:
                # The cursor goes back to the first column: what others print next starts there and not after our text.
                self._console.print(markup, end="\r", no_wrap=True, overflow="ellipsis", crop=True)
                self._is_drawn = True

    def erase(self) -> None:
        """Take the passing line away, before something else is written."""
        self._end_with("\x1b[2K")

    def keep(self) -> None:
        """Let the passing line stay as it is, and go on below it."""
        self._end_with("\n")

    def _end_with(self, text: str) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self._write(text)

    def _write(self, text: str) -> None:
        if self._guard.is_open:
            with self._guard:
                sys.stderr.write(text)
                sys.stderr.flush()


class StepWindow:
    """The steps since the last line of progress. The first step of a run is not timed: it includes the start-up."""

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
        """Count one more step."""
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


@dataclass(frozen=True, slots=True)
class PrintOptions:
    """What is printed, and when."""

    every: int | None = None
    """Steps from one line to the next; None spaces them ever wider, see `is_milestone`."""
    progress: bool = True
    phases: bool = False
    memory: bool = False
    loss_scale: bool = False
    rate: bool = True


def is_milestone(count: int) -> bool:
    """1, 10, 20, 50, 100, 200, 500, 1000, ...: enough to see that a run lives and where it goes, at any length."""
    return count == 1 or (count >= 10 and str(count).rstrip("0") in ("1", "2", "5"))


class Printer(Observer):
    """Reads the loss only for a line that is due. Breakdowns of time are means over the steps since the last line."""

    def __init__(self, screen: Screen, memory: Callable[[], Memory], options: PrintOptions) -> None:
        self._screen = screen
        self._memory = memory
        self._options = options
        self._count = 0
        self._window = StepWindow(is_first=True)

    def on_step(self, report: StepReport) -> None:
        """Count the step, and print what is due."""
        self._window.add(report)
        self._count += report.applied  # of this process: a resumed run shows soon that it lives, as a new one does
        every = self._options.every
        if report.applied and (is_milestone(self._count) if every is None else report.step % every == 0):
            for line in self._due(report):
                self._screen.say(line)
            self._window = StepWindow()

    def close(self) -> None:
        """Nothing is held back."""

    def _due(self, report: StepReport) -> Iterator[str]:
        memory = self._memory()
        if self._options.progress:
            yield ", ".join(f"{name}={text}" for name, text in self._figures(report, memory))
        if self._options.phases and (phases := self._window.phases()):
            yield " | ".join(["time (ms)", *(f"{phase}: {value:.2f}" for phase, value in phases.items())])
        if self._options.memory:
            sizes = {"allocated": memory.allocated, "reserved": memory.reserved, "peak": memory.peak}
            yield " | ".join(["memory", *(f"{name}: {gib(size)}" for name, size in sizes.items())])

    def _figures(self, report: StepReport, memory: Memory) -> Iterator[tuple[str, Any]]:
        yield "step", report.step
        yield "skipped", report.skipped_steps
        yield "lr", f"[{', '.join(f'{rate:.6g}' for rate in report.lr)}]"
        if report.momentum:
            yield "mom", list(report.momentum)
        for name, value in (("loss", report.loss), ("grad_norm", report.grad_norm)):
            if value is not None:
                yield name, f"{value:.6g}"
        if self._options.loss_scale:
            yield "loss_scale", f"{report.loss_scale:.6g}"
        if self._options.rate:
            for unit, rate in self._window.rates().items():
                yield f"{unit}_per_sec", f"{rate:.2f}"
            if (mfu := self._window.mfu()) is not None:
                yield "mfu", f"{mfu:.1%}"
        yield "memory", gib(memory.allocated)


def dump_state(config: Config, world: World) -> None:
    """With `dump_state`, print on rank 0 every value that was given or derived, and from where; no key to a service."""
    if config.dump_state and world.rank == 0:
        shown = [item for item in values(config, defaults=False) if not item.path.endswith("api_key")]
        Screen().say("\n  ".join(["configuration, without defaults", *as_lines(shown)]))


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
        self._window = StepWindow(is_first=True)
        self._step_seconds: float | None = None
        # Many programs never destroy an engine; their last line should not vanish under the prompt.
        atexit.register(self.close)

    def on_step(self, report: StepReport) -> None:
        """Count the step, and draw the line if it is time."""
        self._window.add(report)
        if report.applied and (self._clock() >= self._next or report.step == self._total):
            self._screen.show(self._line(report))
            self._window = StepWindow()
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
        if self._has_rate and (rates := self._window.rates()):
            unit, rate = list(rates.items())[-1]  # tokens, where they are known: 80 columns have no room for both
            parts.append(f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s")
        if self._has_rate and (mfu := self._window.mfu()) is not None:
            parts.append(f"MFU {mfu:.1%}")
        parts.append(gib(self._memory().allocated))
        if (left := self._seconds_left(report.step)) is not None:
            parts.append(f"[dim]{timedelta(seconds=round(left))} left[/]")
        return "  ".join(parts)

    def _seconds_left(self, step: int) -> float | None:
        latest = self._window.step_seconds()
        if latest is None or self._total is None:
            return None
        # The last ten lines or so: neither one slow step nor a slow start should decide.
        before = self._step_seconds if self._step_seconds is not None else latest
        self._step_seconds = 0.9 * before + 0.1 * latest
        return max(0, self._total - step) * self._step_seconds
