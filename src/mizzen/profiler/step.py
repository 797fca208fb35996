"""The flops profile of one step of a run, and what follows from it: the share of the device that later steps use.

What devices can do at most is a table: dense 16-bit products with wide sums, in TFLOPS, as their makers say.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch import nn

from mizzen.accelerator import Accelerator, Timer
from mizzen.config.observe import FlopsProfilerConfig
from mizzen.monitor.output import OutputGuard
from mizzen.monitor.report import Meter, Observer, StepReport
from mizzen.profiler.count import Count
from mizzen.profiler.flops import show
from mizzen.profiler.render import Setting, page
from mizzen.profiler.tree import Branch, grow

PEAKS: Final = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "MI325X": 1307.4,
    "MI300X": 1307.4,
    "MI250X": 191.5,
}
"""By a part of the device's name; the first that fits counts. A MI250X is two devices to torch, and this is one."""


def peak_of(name: str) -> float | None:
    """TFLOPS of a device in 16 bits; None where it is not known."""
    words = name.replace("-", " ").split()
    for known, peak in PEAKS.items():
        if all(word in words for word in known.split()):
            return peak
    return None


COUNTED: Final = ("forward", "backward")


class ProfiledStep(Observer, Meter):
    """Counts one step, by all ranks alike, and tells of it on rank 0. Of later steps it measures `tflops` and `mfu`.

    around(phase)     by the engine, around each phase of every step
    on_step(report)   at its end
    """

    def __init__(
        self,
        config: FlopsProfilerConfig,
        model: nn.Module,
        accelerator: Accelerator,
        setting: Setting,
        *,
        peak: float | None,
        is_shown: bool,
    ) -> None:
        self._config = config
        self._file = str(Path(config.output_file).absolute()) if config.output_file else None
        self._model = model
        self._accelerator = accelerator
        self._setting = replace(setting, step=config.profile_step, recompute_factor=config.recompute_fwd_factor)
        self._peak = peak
        self._is_shown = is_shown
        self._count: Count | None = None
        """Set while a step is to be counted."""
        self._timers: dict[str, Timer] = {}
        self._counted: tuple[Branch, StepReport] | None = None

    @property
    def tree(self) -> Branch | None:
        """What was counted, once it was."""
        return self._counted[0] if self._counted else None

    @contextmanager
    def around(self, phase: str) -> Iterator[None]:
        """Count a phase of the step that is to be counted."""
        if self._count is None:
            yield
            return
        timer = self._timers.setdefault(phase, Timer(self._accelerator))
        if phase not in COUNTED:
            with timer:
                yield
            return
        with self._count.open(), timer:
            yield

    def on_step(self, report: StepReport) -> None:
        """Tell of the step that was counted, or make ready for it."""
        if self._count is not None:
            self._finish(self._count, report)
            self._count = None
        elif self._counted is None and report.step >= self._config.profile_step:
            self._count = Count(self._model, self._accelerator)

    def close(self) -> None:
        """Nothing is held back."""
        self._count = None

    def read(self, report: StepReport) -> Mapping[str, float]:
        """The operations of the model per second on this rank, and as a share of what its device can do.

        A step has as many operations as the counted one, for each token or, where there are none, for each sample.
        """
        if self._counted is None or report.seconds <= 0:
            return {}
        tree, then = self._counted
        share = report.tokens / then.tokens if report.tokens and then.tokens else report.samples / then.samples
        tflops = tree.model_flops * share / report.seconds / 1e12
        return {"tflops": tflops} | ({"mfu": tflops / self._peak} if self._peak else {})

    def _finish(self, count: Count, report: StepReport) -> None:
        tree = grow(self._model, count.read())
        self._counted = tree, report
        seconds = {phase: timer.read() for phase, timer in self._timers.items()}
        if not self._is_shown:
            return
        setting = replace(
            self._setting,
            forward_seconds=seconds.get("forward", 0.0),
            backward_seconds=seconds.get("backward", 0.0),
            step_seconds=seconds.get("step", 0.0),
            samples=report.samples,
        )
        config = self._config
        text = page(
            tree,
            setting,
            module_depth=config.module_depth,
            top_modules=config.top_modules,
            detailed_too=config.detailed,
        )
        with OutputGuard("flops_profiler.output_file" if self._file else "standard output"):
            show(text, self._file)


def tree_of(observers: Iterable[Observer]) -> Branch | None:
    """What was counted of a run; None without a profile, and before its step."""
    return next((observer.tree for observer in observers if isinstance(observer, ProfiledStep)), None)
