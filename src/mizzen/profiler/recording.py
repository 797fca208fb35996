"""Some steps of a run, recorded by torch into a file: what torch.profiler sees, and what the allocator sees."""

from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from mizzen.config.observe import SnapshotConfig, TraceConfig
from mizzen.log import say
from mizzen.monitor.output import OutputGuard
from mizzen.monitor.report import Observer, StepReport


class Recorder(Protocol):
    """start() once, then write(path) once."""

    ending: str
    """Of the file."""

    def start(self) -> None:
        """Record from here on."""
        ...

    def write(self, path: Path) -> None:
        """Stop, and write what was recorded."""
        ...


class RecordedSteps(Observer):
    """Records `steps` steps from the one on that follows `start` others. A run that ends before writes what it has."""

    def __init__(self, name: str, recorder: Recorder, path: Path, *, start: int, steps: int) -> None:
        self._guard = OutputGuard(name)
        self._recorder = recorder
        self._path = path
        self._start, self._steps = start, steps
        self._left: int | None = None
        """Steps to record yet, once it has begun."""
        if start == 0:
            self._begin()

    def on_step(self, report: StepReport) -> None:
        """Begin, or count, or end."""
        if self._left:
            self._left -= 1
            if not self._left:
                self._end()
        elif self._left is None and report.step >= self._start:
            self._begin()

    def close(self) -> None:
        """Write what there is."""
        if self._left:
            self._left = 0
            self._end()

    def _begin(self) -> None:
        self._left = self._steps
        with self._guard:
            self._recorder.start()

    def _end(self) -> None:
        if self._guard.is_open:
            with self._guard:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._recorder.write(self._path)
                say(f"{self._guard.name}: {self._path}")


class Trace(Recorder):
    """torch.profiler, on the host and on the device."""

    ending = "json.gz"

    def __init__(self, config: TraceConfig) -> None:
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])],
            record_shapes=config.shapes,
            with_stack=config.stacks,
            profile_memory=config.memory,
        )

    def start(self) -> None:
        """Record from here on."""
        self._profile.start()

    def write(self, path: Path) -> None:
        """Stop, and write it."""
        self._profile.stop()
        self._profile.export_chrome_trace(str(path))


class Snapshot(Recorder):
    """The history of the CUDA allocator."""

    ending = "pickle"

    def __init__(self, config: SnapshotConfig) -> None:
        self._entries = config.max_entries

    def start(self) -> None:
        """Record from here on."""
        torch.cuda.memory._record_memory_history(max_entries=self._entries)

    def write(self, path: Path) -> None:
        """Write it, and record no further."""
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
