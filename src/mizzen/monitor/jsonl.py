"""One line of JSON per optimizer step: the record of a run that needs no package to be written or read."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mizzen.accelerator import Memory
from mizzen.config.observe import JsonlConfig
from mizzen.monitor.append import LineFile
from mizzen.monitor.report import Event, StepReport


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
