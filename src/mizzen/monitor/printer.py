"""Lines that stay: progress, and the breakdowns of time and memory, at the steps where one is due."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mizzen.accelerator import Memory
from mizzen.config.dump import as_lines, values
from mizzen.config.schema import Config
from mizzen.environment import World
from mizzen.monitor.report import Observer, StepReport
from mizzen.monitor.screen import Screen
from mizzen.monitor.stretch import Stretch, gib


@dataclass(frozen=True, slots=True)
class Lines:
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

    def __init__(self, screen: Screen, memory: Callable[[], Memory], lines: Lines) -> None:
        self._screen = screen
        self._memory = memory
        self._lines = lines
        self._count = 0
        self._stretch = Stretch(is_first=True)

    def on_step(self, report: StepReport) -> None:
        """Count the step, and print what is due."""
        self._stretch.add(report)
        if report.applied and self._is_due(report.step):
            for line in self._due(report):
                self._screen.say(line)
            self._stretch = Stretch()

    def close(self) -> None:
        """Nothing is held back."""

    def _is_due(self, step: int) -> bool:
        self._count += 1  # steps of this process: a resumed run shows soon that it lives, as a new one does
        return is_milestone(self._count) if self._lines.every is None else step % self._lines.every == 0

    def _due(self, report: StepReport) -> Iterator[str]:
        memory = self._memory()
        if self._lines.progress:
            yield ", ".join(f"{name}={text}" for name, text in self._figures(report, memory))
        if self._lines.phases and (phases := self._stretch.phases()):
            yield " | ".join(["time (ms)", *(f"{phase}: {value:.2f}" for phase, value in phases.items())])
        if self._lines.memory:
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
        if self._lines.loss_scale:
            yield "loss_scale", f"{report.loss_scale:.6g}"
        if self._lines.rate:
            for unit, rate in self._stretch.rates().items():
                yield f"{unit}_per_sec", f"{rate:.2f}"
            if (mfu := self._stretch.mfu()) is not None:
                yield "mfu", f"{mfu:.1%}"
        yield "memory", gib(memory.allocated)


def dump_state(config: Config, world: World) -> None:
    """With `dump_state`, print on rank 0 every value that was given or derived, and from where; no key to a service."""
    if config.dump_state and world.rank == 0:
        shown = [item for item in values(config, defaults=False) if not item.path.endswith("api_key")]
        Screen().say("\n  ".join(["configuration, without defaults", *as_lines(shown)]))
