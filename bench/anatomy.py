"""Where the time of a step goes: operators, waits of the host, and the Python of the libraries themselves."""

import cProfile
import pstats
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from bench.record import table

SHOWN: Final = 14
"""Rows of a table."""
LIBRARIES: Final = ("mizzen", "deepspeed", "torch")


def render(name: str, found: dict[str, Any]) -> str:
    """The findings on one system, per step."""
    waits = [f"{where}: {count:g}" for where, count in found["waits"].items()] or ["none"]
    own = ", ".join(f"{library} {ms:.2f} ms" for library, ms in found["python_ms"].items())
    parts = [
        f"## {name}: {found['wall_ms']:.1f} ms/step, busy {found['busy_ms']:.1f} ms on the {found['device']}",
        "host waits for the device per step: " + "; ".join(waits) if found["device"] != "cpu" else "",
        f"own time of Python functions per step, under cProfile, on the main thread: {own}",
        table(["operator", "calls/step", "ms/step", "of busy"], found["operators"]),
        table(["function", "calls/step", "own ms/step", "ms/step"], found["functions"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def examine(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Run some steps under each instrument in turn; none of them sees the cost of another."""
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    _synchronize()
    wall = 1000 * (time.perf_counter() - begin) / steps
    return {"wall_ms": wall, **_waits(step, steps), **_operators(step, steps), **_functions(step, steps)}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _waits(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Where the host waits for the device, as torch's own debug mode sees it."""
    if not torch.cuda.is_available():
        return {"waits": {}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(steps):
            step()
        torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{_short(warning.filename)}:{warning.lineno}" for warning in caught if "synchroniz" in str(warning.message)
    )
    return {"waits": {place: count / steps for place, count in places.most_common()}}


def _operators(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Operators by their own time: kernels on a GPU, calls into torch on a CPU."""
    is_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    with profile(activities=activities) as found:
        for _ in range(steps):
            step()
        _synchronize()
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in found.key_averages():
        on_device = event.device_type.name == "CUDA"
        if is_gpu == on_device:
            spent = event.self_device_time_total if is_gpu else event.self_cpu_time_total
            times[event.key] += spent / 1000 / steps
            calls[event.key] += event.count / steps
    busy = sum(times.values())
    rows = [
        (name[:90], f"{calls[name]:g}", f"{ms:.2f}", f"{100 * ms / busy:.1f} %")
        for name, ms in times.most_common(SHOWN)
    ]
    return {"device": "GPU" if is_gpu else "cpu", "busy_ms": busy, "operators": rows}


def _functions(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Python functions by their own time. cProfile makes each call slower, so these are upper bounds."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        step()
    profiler.disable()
    own: Counter[str] = Counter()
    rows = []
    for (file, line, name), (_, count, spent, total, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        library = _library(file)
        if library:
            own[library] += 1000 * spent / steps
        if library in ("mizzen", "deepspeed"):
            rows.append((spent, f"{_short(file)}:{line} {name}", count, total))
    rows.sort(reverse=True)
    shown = [
        (name, f"{count / steps:g}", f"{1000 * spent / steps:.3f}", f"{1000 * total / steps:.3f}")
        for spent, name, count, total in rows[:SHOWN]
    ]
    return {"python_ms": dict(own.most_common()), "functions": shown}


def _library(file: str) -> str | None:
    parts = Path(file).parts
    return next((library for library in LIBRARIES if library in parts), None)


def _short(file: str) -> str:
    parts = Path(file).parts
    library = _library(file)
    return "/".join(parts[len(parts) - 1 - parts[::-1].index(library) :]) if library else Path(file).name
