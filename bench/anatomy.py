"""Where the time of a step goes: operators, waits of the host, and the Python of the libraries themselves."""

import cProfile
import pstats
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from bench.record import table

SHOWN: Final = 16
"""Rows of a table."""
WIDTH: Final = 100
"""Characters of a name."""
ENGINES: Final = ("mizzen", "deepspeed")
"""The libraries whose functions are listed one by one."""
FAMILIES: Final = {
    "compiled": ("triton",),
    "attention": ("sdpa", "flash", "fmha"),
    "products": ("nvjet", "gemm", "cutlass"),
    "optimizer": ("adam",),
    "sums and norms": ("reduce_kernel", "norm", "softmax"),
    "fills": ("fillfunctor", "memset"),
    "casts and copies": ("copy", "memcpy", "convert", "catarray"),
    "collectives": ("nccl",),
}
"""Kernels by what is in their names; the first that fits. The rest are element-wise."""


def render(name: str, found: dict[str, Any]) -> str:
    """The findings on one system, per step."""
    is_gpu = found["device"] == "GPU"
    own = ", ".join(f"{library} {ms:.2f} ms" for library, ms in found["python_ms"].items() if ms > 0.005)
    net = ", ".join(f"{library} {ms:.2f} ms" for library, ms in found["net_ms"].items())
    parts = [f"## {name}: {found['wall_ms']:.1f} ms/step, busy {found['busy_ms']:.1f} ms on the {found['device']}"]
    if is_gpu:
        waits = [f"{where} {count:g}" for where, count in found["waits"].items()] or ["none"]
        parts.append(f"the host waits for the device, times per step: {', '.join(waits)}")
        parts.append(table(["kernels", "calls/step", "ms/step", "of busy"], found["families"]))
    parts += [
        f"own time of Python functions per step, under cProfile: {own}",
        *([f"without what cProfile itself takes for each call: {net}"] if net else []),
        table(["operator", "calls/step", "ms/step", "of busy"], found["operators"]),
    ]
    if found["functions"]:
        parts.append(table(["function", "calls/step", "own ms/step", "ms/step"], found["functions"]))
    return "\n\n".join(parts) + "\n"


def examine(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Run some steps under each instrument in turn; none of them sees the cost of another."""
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    _synchronize()
    wall = 1000 * (time.perf_counter() - begin) / steps
    return {"wall_ms": wall, "waits": _waits(step, steps), **_operators(step, steps), **_functions(step, steps)}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _waits(step: Callable[[], Any], steps: int) -> dict[str, float]:
    """Where the host waits for the device, as torch's own debug mode sees it."""
    if not torch.cuda.is_available():
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(steps):
            step()
        torch.cuda.set_sync_debug_mode("default")
    said = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
    places = Counter(f"{short(warning.filename)}:{warning.lineno}" for warning in said)
    return {place: round(count / steps, 2) for place, count in places.most_common()}


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
        is_kernel = event.device_type.name == "CUDA" and not event.is_user_annotation
        if is_gpu == is_kernel:
            times[event.key] += (event.self_device_time_total if is_gpu else event.self_cpu_time_total) / 1000 / steps
            calls[event.key] += event.count / steps
    return {
        "device": "GPU" if is_gpu else "CPU",
        "busy_ms": sum(times.values()),
        "operators": _rows(times, calls),
        "families": _rows(_by_family(times), _by_family(calls)),
    }


def _rows(times: Counter[str], calls: Counter[str]) -> list[tuple[str, str, str, str]]:
    busy = sum(times.values()) or 1.0
    top = times.most_common(SHOWN)
    return [(name[:WIDTH], f"{calls[name]:g}", f"{ms:.2f}", f"{100 * ms / busy:.1f} %") for name, ms in top]


def _by_family(numbers: Counter[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for kernel, number in numbers.items():
        found[family(kernel)] += number
    return found


def family(kernel: str) -> str:
    """What a kernel does, by its name."""
    name = kernel.lower()
    return next((word for word, marks in FAMILIES.items() if any(mark in name for mark in marks)), "element-wise")


def _functions(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Python functions by their own time. cProfile makes each call slower, so these are upper bounds."""
    found = _profiled(lambda: [step() for _ in range(steps)])
    own: Counter[str] = Counter()
    added: Counter[str] = Counter()
    rows = []
    overhead = _overhead()
    for (file, line, name), (_, count, spent, total, callers) in found.items():
        library = _library(file)
        if library is None:  # built in; the profiler's work is charged to who calls it
            for (caller, *_), (calls, *_) in callers.items():
                added[_library(caller) or ""] += overhead.built_in * calls
            continue
        own[library] += spent
        added[library] += overhead.python * count
        if library in ENGINES:
            rows.append((spent, f"{short(file)}:{line} {name}", count, total))
    rows.sort(reverse=True)
    shown = [
        (name, f"{count / steps:.4g}", f"{1000 * spent / steps:.3f}", f"{1000 * total / steps:.3f}")
        for spent, name, count, total in rows[:SHOWN]
    ]
    return {
        "python_ms": {library: 1000 * spent / steps for library, spent in own.most_common(4)},
        "net_ms": {library: 1000 * (own[library] - added[library]) / steps for library in ENGINES if own[library]},
        "functions": shown,
    }


def _library(file: str) -> str | None:
    """Whose a function is; None for one that is built in."""
    library = short(file).partition("/")[0]
    return None if library.startswith(("~", "<")) else library


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds that cProfile adds to the own time of Python functions for each call."""

    python: float
    """Of a Python function."""
    built_in: float
    """Of one that is built in; its own part of that is not counted here."""


def _overhead(calls: int = 100_000, tries: int = 5) -> Overhead:
    """Measured by loops that do nothing but call."""

    def nothing(value: object) -> None:
        """As its name says."""

    def to_python() -> None:
        for _ in range(calls):
            nothing(calls)

    def to_built_in() -> None:
        for _ in range(calls):
            id(calls)

    def least(loop: Callable[[], None]) -> float:
        seconds = []
        for _ in range(tries):
            begin = time.perf_counter()
            loop()
            bare = time.perf_counter() - begin
            own = sum(spent for (file, *_), (_, _, spent, *_) in _profiled(loop).items() if _library(file))
            seconds.append((own - bare) / calls)
        return max(min(seconds), 0.0)

    return Overhead(least(to_python), least(to_built_in))


def _profiled(work: Callable[[], Any]) -> dict[Any, Any]:
    """What `pstats` knows of every function."""
    profiler = cProfile.Profile()
    profiler.enable()
    work()
    profiler.disable()
    stats: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    return stats


def short(file: str) -> str:
    """A file's path from its library on: below site-packages, or below the source folder of one."""
    parts = Path(file).parts
    for folder in ("site-packages", "src"):
        if folder in parts[:-1]:
            return "/".join(parts[len(parts) - parts[::-1].index(folder) :])
    for engine in ENGINES:
        if engine in parts[:-1]:
            return "/".join(parts[parts.index(engine) :])
    return Path(file).name
