"""The numbers of a run and where they are written: the monitor, the `Sink` protocol, and one sink per service.

A new sink is a class here, a section in `config/observe.py` and a line in `build.py`.
"""

import atexit
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from operator import index
from pathlib import Path
from typing import Any, Final, Protocol

from mizzen.accelerator import Memory
from mizzen.config.observe import CometConfig, CsvConfig, JsonlConfig, TensorboardConfig, WandbConfig
from mizzen.errors import UsageError
from mizzen.monitor.output import LineFile, OutputGuard, require
from mizzen.monitor.report import Event, Observer, StepReport


class Sink(Protocol):
    """A place where numbers are written. The monitor calls, on rank 0 only and on the engine's thread:

    write(events, report)   once per optimizer step, with the report that the events were made of
    write(events)           whenever the user writes events of their own
    flush()                 when what was written so far must be safe
    close()                 once; nothing after it

    It may raise whatever its library raises: it is then given up, with a warning, and training goes on.
    """

    def write(self, events: Sequence[Event], report: StepReport | None = None) -> None:
        """Write some events."""
        ...

    def flush(self) -> None:
        """Let go of everything that is still buffered."""
        ...

    def close(self) -> None:
        """Flush, and give the place back."""
        ...


class RunMonitor(Observer):
    """An observer that writes each step to every sink, and what users reach as `engine.monitor`."""

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        *,
        enabled: bool,
        has_loss_scale: bool = False,
        has_rate: bool = True,
    ) -> None:
        self.enabled = enabled
        """Whether the configuration names a sink: the same on every rank, so that collectives may depend on it."""
        self._sinks = [(OutputGuard(name), sink) for name, sink in sinks.items()]
        self._has_loss_scale = has_loss_scale
        self._has_rate = has_rate
        self._is_first = True

    def write_events(self, events: Iterable[Event]) -> None:
        """Write `(name, value, global samples)` of the user's own. Every rank may call it; rank 0 writes."""
        if self._sinks:
            checked = [_checked(event) for event in events]
            self._each(lambda sink: sink.write(checked))

    def on_step(self, report: StepReport) -> None:
        """Write one step."""
        if self._sinks:
            has_rate = self._has_rate and not self._is_first  # the first step's time includes the start of the run
            events = events_of(report, has_loss_scale=self._has_loss_scale, has_rate=has_rate)
            self._is_first = False
            self._each(lambda sink: sink.write(events, report))

    def flush(self) -> None:
        """Make what was written so far safe, as far as each sink can."""
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        """Close every sink."""
        self._each(lambda sink: sink.close())
        self._sinks = []

    def _each(self, use: Callable[[Sink], None]) -> None:
        for guard, sink in self._sinks:
            with guard:
                use(sink)
        self._sinks = [(guard, sink) for guard, sink in self._sinks if guard.is_open]


def monitor_of(observers: Iterable[Observer]) -> RunMonitor:
    """The monitor among some observers; one that writes nothing where there is none."""
    return next((each for each in observers if isinstance(each, RunMonitor)), RunMonitor({}, enabled=False))


def _checked(event: Any) -> Event:
    """Numbers of any kind (tensors, numpy scalars) become Python's, so that no sink has to know them."""
    try:
        name, value, samples = event
        return str(name), value if isinstance(value, int | float) else float(value), index(samples)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"an event is (name, number, global samples), not {event!r}: {error}") from error


def events_of(report: StepReport, *, has_loss_scale: bool, has_rate: bool) -> list[Event]:
    """The numbers of one optimizer step, at the samples seen so far. Reads the loss and the norm."""
    values = {
        "train_loss": report.loss,
        "lr": report.lr[0] if report.lr else None,
        "grad_norm": report.grad_norm,
        "loss_scale": report.loss_scale if has_loss_scale else None,
        "samples_per_sec": report.samples / report.seconds if has_rate and report.seconds > 0 else None,
    }
    values |= {f"elapsed_time_ms_{phase}": seconds * 1e3 for phase, seconds in report.phases.items()}
    values |= report.measures
    return [
        (f"Train/Samples/{name}", value, report.global_samples) for name, value in values.items() if value is not None
    ]


class JsonlSink:
    """`<output_path>/<job_name>.jsonl`: a line for each step, with all of its report, and for each event of a user."""

    def __init__(self, config: JsonlConfig, memory: Callable[[], Memory]) -> None:
        self._memory = memory
        self._file = LineFile(Path(config.output_path) / f"{config.job_name}.jsonl")

    def write(self, events: Sequence[Event], report: StepReport | None = None) -> None:
        """Append the step, or each event that comes without one."""
        if report is not None:
            self._append(_record(report) | {"memory": asdict(self._memory())})
            return
        for name, value, samples in events:
            self._append({"event": name, "value": value, "global_samples": samples})

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, record: dict[str, Any]) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._file.append(json.dumps(_strict({"time": time} | record), allow_nan=False))


def _record(report: StepReport) -> dict[str, Any]:
    return {
        "step": report.step,
        "applied": report.applied,
        "reason": report.reason,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": list(report.lr),
        "loss_scale": report.loss_scale,
        "samples": report.samples,
        "global_samples": report.global_samples,
        "tokens": report.tokens,
        "seconds": report.seconds,
        "skipped_steps": report.skipped_steps,
        "phases": report.phases,
        "measures": dict(report.measures),
    }


def _strict(value: Any) -> Any:
    """JSON has no infinity and no NaN: as the texts "inf" and "nan" any reader takes them, and `float` reads them."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {key: _strict(inner) for key, inner in value.items()}
        case list():
            return [_strict(inner) for inner in value]
        case _:
            return value


MOST_OPEN: Final = 64
"""Files kept open. A user who writes a number for each layer must not run out of file descriptors."""


class CsvSink:
    """`<output_path>/<job_name>/Train_Samples_lr.csv` for `Train/Samples/lr`, with the header `step,lr`."""

    def __init__(self, config: CsvConfig) -> None:
        self._folder = Path(config.output_path or "csv_logs").absolute() / config.job_name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, LineFile] = {}

    def write(self, events: Sequence[Event], report: StepReport | None = None) -> None:
        """Append each event to its file."""
        for name, value, samples in events:
            self._file(name).append(f"{samples},{value}")

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Close every file."""
        while self._files:
            self._close_oldest()

    def _file(self, name: str) -> LineFile:
        if name not in self._files:
            if len(self._files) >= MOST_OPEN:
                self._close_oldest()
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            self._files[name] = LineFile(path, header=f"step,{_quoted(name.split('/')[-1])}")
        return self._files[name]

    def _close_oldest(self) -> None:
        self._files.pop(next(iter(self._files))).close()


def _quoted(text: str) -> str:
    """A name with a comma or a quote is one column still."""
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\r\n') else text


FLUSH_SECONDS: Final = 10
"""What a killed run loses at most."""


class TensorboardSink:
    """`<output_path>/<job_name>/events.out.tfevents.*`; a resumed run adds a file, and TensorBoard joins them."""

    def __init__(self, config: TensorboardConfig) -> None:
        require("tensorboard", extra="tensorboard", purpose="tensorboard.enabled")
        folder = Path(config.output_path or "runs") / config.job_name
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder), flush_secs=FLUSH_SECONDS)
        # Many programs never destroy an engine, and the writer's thread dies with the process, with all it has queued.
        atexit.register(self.close)

    def write(self, events: Sequence[Event], report: StepReport | None = None) -> None:
        """Add each event as a scalar."""
        for name, value, samples in events:
            self._writer.add_scalar(name, value, samples)

    def flush(self) -> None:
        """Write out the queue."""
        self._writer.flush()

    def close(self) -> None:
        """Write out the queue and end the thread."""
        atexit.unregister(self.close)
        self._writer.close()


class WandbSink:
    """The run that the program has already started, or a new one; only a new one is finished at the end."""

    def __init__(self, config: WandbConfig) -> None:
        wandb = require("wandb", extra="wandb", purpose="wandb.enabled")
        self._is_ours = wandb.run is None
        self._run = wandb.run or wandb.init(project=config.project, group=config.group, entity=config.team)

    def write(self, events: Sequence[Event], report: StepReport | None = None) -> None:
        """Log all events at the same number of samples in one call, with that number as the step."""
        for samples in dict.fromkeys(samples for _, _, samples in events):
            self._run.log({name: value for name, value, at in events if at == samples}, step=samples)

    def flush(self) -> None:
        """W&B sends in a process of its own."""

    def close(self) -> None:
        """Finish the run, if it is ours."""
        if self._is_ours:
            self._run.finish()


class CometSink:
    """A Comet experiment, new or continued, as the section says."""

    def __init__(self, config: CometConfig) -> None:
        comet = require("comet_ml", extra="comet", purpose="comet.enabled")
        self._interval = config.samples_log_interval
        self._last: dict[str, int] = {}
        self._experiment = comet.start(
            api_key=config.api_key,
            workspace=config.workspace,
            project_name=config.project,
            experiment_key=config.experiment_key,
            mode=config.mode,
            online=config.online,
        )
        if config.experiment_name is not None:
            self._experiment.set_name(config.experiment_name)

    def write(self, events: Sequence[Event], report: StepReport | None = None) -> None:
        """Log those events whose name has not been logged for `samples_log_interval` samples."""
        for name, value, samples in events:
            # The distance, not the difference: training that goes back to a checkpoint is logged from there.
            if name not in self._last or abs(samples - self._last[name]) >= self._interval:
                self._last[name] = samples
                self._experiment.log_metric(name, value, step=samples)

    def flush(self) -> None:
        """Send what is queued."""
        self._experiment.flush()

    def close(self) -> None:
        """Send what is queued and end the experiment."""
        self._experiment.end()
