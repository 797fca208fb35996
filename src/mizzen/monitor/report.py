"""What happened in one optimizer step, and who is told of it. Device values are read when they are asked for.

The measures of a step, beside those that the profiler and the communication add:

samples_per_sec, tokens_per_sec                    of all ranks
elapsed_time_ms_forward, _backward, _step          with wall_clock_breakdown, of the latest step that is done
memory_allocated, memory_reserved, memory_peak     bytes of this rank's device
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Protocol

from mizzen.accelerator import Memory

Lazy = Callable[[], float | None]


def _nothing() -> None:
    return None


def _known(value: float | None) -> float | None:
    return value


@dataclass(frozen=True, slots=True)
class StepReport:
    """One call of `step` or `train_batch`. `applied` is the truth about whether parameters changed."""

    step: int
    """Optimizer steps taken so far, this one included if it was applied."""
    applied: bool
    reason: str = ""
    """Why it was not applied: still accumulating, or which gradient on which rank was not finite."""
    lr: tuple[float, ...] = ()
    """Learning rate of each parameter group, as this step used it."""
    momentum: tuple[Any, ...] = ()
    """Momentum, or betas, of each parameter group."""
    loss_scale: float = 1.0
    """What the losses of this step were multiplied with before backward."""
    samples: int = 0
    """Samples of all ranks that went into this step."""
    global_samples: int = 0
    """Samples of all ranks so far, those of skipped steps included."""
    tokens: int | None = None
    """Tokens of all ranks, where the inputs show them."""
    seconds: float = 0.0
    """Since the previous step ended, by the host's clock; for the first one since the engine was built."""
    skipped_steps: int = 0
    """Steps skipped so far because a gradient was not finite."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds per phase of the latest step that the device has finished, with `wall_clock_breakdown`."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """Numbers by name, read without a wait for the device; the names are at the top of this file."""
    read_loss: Lazy = field(default=_nothing, repr=False)
    read_norm: Lazy = field(default=_nothing, repr=False)

    @property
    def is_boundary(self) -> bool:
        """Whether this call ended an optimizer step, applied or skipped."""
        return self.applied or self.reason != ACCUMULATING

    @property
    def skipped(self) -> bool:
        """Whether a step was due and not taken."""
        return self.is_boundary and not self.applied

    @property
    def loss(self) -> float | None:
        """The mean loss of this step over micro-batches and ranks; reading it waits for the device."""
        return self.read_loss()

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the gradient before clipping; reading it waits for the device."""
        return self.read_norm()

    def __reduce__(self) -> tuple[Any, ...]:
        """A report that is pickled or copied carries its numbers, and so waits for the device."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        known = {"read_loss": partial(_known, self.loss), "read_norm": partial(_known, self.grad_norm)}
        return partial(StepReport, **values | known), ()

    def __str__(self) -> str:
        state = "applied" if self.applied else f"not applied: {self.reason}"
        return f"StepReport(step={self.step}, loss={self.loss}, grad_norm={self.grad_norm}, {state})"


ACCUMULATING = "accumulating"


class Meter(Protocol):
    """Adds numbers to the report of a step. Called on the engine's thread, on every rank; it never waits."""

    def read(self, report: StepReport) -> Mapping[str, float]:
        """Its numbers by name; one that is not known in this step is left out."""
        ...


class Observer(Protocol):
    """Told of every step; never asked anything. Called on the engine's thread, on every rank."""

    def on_step(self, report: StepReport) -> None:
        """One optimizer step has ended."""

    def on_load(self, step: int) -> None:
        """The engine goes on after this step: a checkpoint was loaded. Most have nothing to do."""
        return

    def on_save(self, tag: str, step: int, seconds: float) -> None:
        """A checkpoint is committed; a save beside training says so from its own thread. Most have nothing to do."""
        return

    def close(self) -> None:
        """The engine goes away."""


Event = tuple[str, Any, int]
"""(name, value, global samples): what sinks write."""


class Rates(Meter):
    """Samples and tokens per second. The first step is not timed: its seconds include the start of the run."""

    def __init__(self) -> None:
        self._is_first = True

    def read(self, report: StepReport) -> Mapping[str, float]:
        """Samples and, where they are known, tokens per second."""
        if self._is_first or report.seconds <= 0:
            self._is_first = False
            return {}
        rates = {"samples_per_sec": report.samples / report.seconds}
        return rates | ({"tokens_per_sec": report.tokens / report.seconds} if report.tokens is not None else {})


class PhaseTimes(Meter):
    """Milliseconds of each phase."""

    def read(self, report: StepReport) -> Mapping[str, float]:
        """Milliseconds by phase, of the phases that the report has."""
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
