"""What this process may use of its host: cores and memory, with the limits of its container. No torch.

Where a file of the kernel is absent (macOS, Windows, a sandbox), psutil's answer stands. `root` lets a test lay out
the files of another machine.
"""

import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil

from mizzen.accelerator.protocol import Capacity, Memory
from mizzen.log import warn_once

ROOT: Final = Path("/")


def capacity(root: Path = ROOT) -> Capacity:
    """The memory of the host, or of the control group where that is less."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for folder in _groups("memory", root):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        if limit is None or limit >= machine.total:
            continue
        used = _number(folder, "memory.current", "memory.usage_in_bytes") or 0
        total = min(total, limit)
        available = min(available, max(0, limit - used + _reclaimable(folder)))
    return Capacity(total=total, available=available)


def cores(root: Path = ROOT) -> int:
    """Physical cores that this process may run on: its affinity, each core once, under its quota."""
    allowed = _affinity()
    threads = {_read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in allowed}
    count = min(len(allowed), psutil.cpu_count(logical=False) or len(allowed)) if None in threads else len(threads)
    for folder in _groups("cpu", root):
        if (quota := _quota(folder)) is not None:
            count = min(count, int(quota))
    return max(1, count)


def own_cores(local_rank: int, local_size: int, root: Path = ROOT) -> tuple[int, ...]:
    """The physical cores for the work of one rank on the host: those that it was bound to, or its part of all.

    On a machine with several memory domains the cores of a rank are of one of them, or of whole ones.
    """
    allowed = _affinity()
    physical = _first_threads(allowed, root)
    if local_size <= 1 or _is_bound(allowed):
        return physical[: cores(root)]
    domains = [tuple(core for core in domain if core in physical) for domain in _domains(root)]
    found = share_of([domain for domain in domains if domain] or [physical], local_rank, local_size)
    return found[: max(1, cores(root) // local_size)]


def share_of(domains: Sequence[Sequence[int]], rank: int, ranks: int) -> tuple[int, ...]:
    """The cores of one of so many ranks, which are spread over the domains in their order."""
    if ranks <= len(domains):
        first, last = rank * len(domains) // ranks, (rank + 1) * len(domains) // ranks
        return tuple(core for domain in domains[first:last] for core in domain)
    place = rank * len(domains) // ranks
    there = [each for each in range(ranks) if each * len(domains) // ranks == place]
    cores, number = domains[place], there.index(rank)
    first, last = number * len(cores) // len(there), (number + 1) * len(cores) // len(there)
    return tuple(cores[first:last]) or (cores[first],)


def bind_thread(cores: Sequence[int]) -> None:
    """Let the thread that calls this, and those that it starts, run on these cores alone, where the system can."""
    if cores and "sched_setaffinity" in dir(os):
        os.sched_setaffinity(0, cores)


def numa_nodes(root: Path = ROOT) -> int:
    """Memory domains of the host; 1 where the kernel does not say."""
    return max(1, len(list((root / "sys/devices/system/node").glob("node[0-9]*"))))


def processor(root: Path = ROOT) -> str:
    """The model of the processor, or at least its family."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def resident(root: Path = ROOT) -> Memory:
    """The resident size of this process, and its peak where the kernel can also reset it (Linux)."""
    size = psutil.Process().memory_info().rss
    for line in (_read(root / "proc/self/status") or "").splitlines():
        key, _, value = line.partition(":")
        if key == "VmHWM":
            return Memory(allocated=size, reserved=size, peak=max(size, int(value.split()[0]) * 1024))
    return Memory(allocated=size, reserved=size, peak=None)


def reset_peak(root: Path = ROOT) -> None:
    """Let the kernel forget the peak of the resident size."""
    switch = root / "proc/self/clear_refs"
    if not switch.exists():
        return
    try:
        switch.write_text("5")  # proc(5): resets VmHWM to the present resident size
    except OSError as error:
        warn_once(f"the peak of the process's memory cannot be reset ({error}): it counts from the start", key="peak")


def _affinity() -> list[int]:
    process = psutil.Process()
    if psutil.LINUX or psutil.WINDOWS:
        return process.cpu_affinity() or []
    return list(range(psutil.cpu_count() or 1))


def _is_bound(allowed: list[int]) -> bool:
    """Whether this process may use fewer cores than the one that started it, as one that a launcher has bound."""
    try:
        parent = psutil.Process().parent()
        return parent is not None and set(allowed) < set(parent.cpu_affinity() or ())
    except (psutil.Error, AttributeError):  # macOS knows no affinity
        return False


def _first_threads(allowed: list[int], root: Path) -> tuple[int, ...]:
    """Each core once: its first thread among those that are allowed."""
    found: dict[str, int] = {}
    for cpu in sorted(allowed):
        siblings = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found.setdefault(siblings or str(cpu), cpu)
    return tuple(found.values())


def _domains(root: Path) -> list[list[int]]:
    """The processors of each memory domain, in the order of their numbers."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    texts = [_read(folder / "cpulist") or "" for folder in sorted(folders, key=lambda each: int(each.name[4:]))]
    parts = [[part.partition("-") for part in text.split(",") if part] for text in texts]
    return [[cpu for first, _, last in each for cpu in range(int(first), int(last or first) + 1)] for each in parts]


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The control group of this process and those around it, from the inside out; every one of them limits it."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 has one tree for all controllers, and a line that names none; version 1 has a tree for each.
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = base / path.lstrip("/")
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(base))


def _quota(folder: Path) -> float | None:
    """The cores that a group may use at a time, which need not be whole."""
    if text := _read(folder / "cpu.max"):
        quota, period = text.split()
        return None if quota == "max" else int(quota) / int(period)
    allowed, each = _number(folder, "cpu.cfs_quota_us"), _number(folder, "cpu.cfs_period_us")
    return allowed / each if allowed and each and allowed > 0 else None


def _reclaimable(folder: Path) -> int:
    """Bytes of file cache that a group's usage contains and that the kernel drops when memory is asked for."""
    found = dict(line.split(" ", 1) for line in (_read(folder / "memory.stat") or "").splitlines() if " " in line)
    return int(found.get("total_inactive_file") or found.get("inactive_file") or 0)


def _number(folder: Path, *names: str) -> int | None:
    """The number in the first of these files that exists; None without a file or without a limit."""
    for name in names:
        if text := _read(folder / name):
            return None if text == "max" else int(text)
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
