"""How fast a disk, or several, take and give tensors: the values behind `mizzen bench io`.

What is timed is what offload does: files past the page cache, blocks in turn on every path, threads that read and
write. `dd` with O_DIRECT on the same files is what to hold it against. Printing is the command line's business.

[Note: times that mean something]
Every file is allocated and written once before the clock runs, because the first write to a new range is slower than
all later ones, and offload writes the same ranges in every step. Without O_DIRECT a write ends when its bytes are on
the disk, and the page cache lets go of them before they are read. A disk that is virtual or has a cache of its own may
still answer from memory: then a size that is larger than that memory tells more.
"""

import mmap
import os
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from mizzen.errors import FileError, UsageError
from mizzen.files import free_bytes
from mizzen.offload.direct_files import DirectFile, aligned
from mizzen.offload.swap_folder import SwapFolder
from mizzen.offload.transfers import MOST_THREADS, Transfers

BLOCKS: Final = (1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of one read or write."""
DEPTHS: Final = (1, 2, 4, 8, 16, 32)
"""Reads and writes under way at once, each in a thread."""
OPERATIONS: Final = ("read", "write")
SIZE: Final = 1 << 28
"""Bytes that are read and written in one trial."""
PANEL, LEGEND, HEIGHT, TOP = 380, 150, 320, 60
COLORS: Final = ("#3b6fb6", "#d98b2b", "#4c9a52", "#b8504a", "#7d63a8", "#3d9c96", "#8c6d3f", "#6a7683")
NEAR: Final = 0.98
"""Of settings whose rate is at least this share of the best, the one with the fewest threads is taken."""


@dataclass(frozen=True, slots=True)
class IoSetting:
    """One way to read and write."""

    block: int
    depth: int
    direct: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The section `aio` of a configuration."""
        found = {"block_size": self.block, "queue_depth": self.depth, "intra_op_parallelism": 1}
        return found if self.direct else {**found, "direct": False}


@dataclass(frozen=True, slots=True)
class IoTiming:
    """One operation with one setting: bytes, and the seconds of every trial."""

    operation: str
    setting: IoSetting
    size: int
    seconds: tuple[float, ...]
    by: str = "mizzen"

    @property
    def rate(self) -> float:
        """GB/s of the median trial."""
        return self.size / statistics.median(self.seconds) / 1e9

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "by": self.by,
            "operation": self.operation,
            "block_size": self.setting.block,
            "queue_depth": self.setting.depth,
            "direct": self.setting.direct,
            "gb_per_s": self.rate,
            "seconds": list(self.seconds),
        }


@dataclass(frozen=True, slots=True)
class IoResult:
    """All timings of some paths."""

    paths: tuple[str, ...]
    size: int
    timings: tuple[IoTiming, ...]

    def of(self, by: str, operation: str) -> list[IoTiming]:
        """Those of one program and one operation."""
        return [timing for timing in self.timings if (timing.by, timing.operation) == (by, operation)]

    def fastest(self, by: str, operation: str) -> IoTiming | None:
        """The one with the highest rate; None where nothing was measured."""
        return max(self.of(by, operation), key=lambda timing: timing.rate, default=None)

    def best(self) -> IoSetting:
        """The setting to use: what is read is written again, so that the time of both together counts."""
        spent: dict[IoSetting, float] = {}
        for timing in self.timings:
            if timing.by == "mizzen":
                spent[timing.setting] = spent.get(timing.setting, 0.0) + 1 / timing.rate
        least = min(spent.values())
        near = [setting for setting, time_of_both in spent.items() if time_of_both * NEAR <= least]
        return min(near, key=lambda setting: (not setting.direct, setting.depth, setting.block))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [timing.as_dict() for timing in self.timings]
        return {"paths": list(self.paths), "bytes": self.size, "timings": rows, "aio": self.best().as_dict()}


@dataclass(frozen=True, slots=True)
class IoSweep:
    """What is to be measured, and where."""

    paths: tuple[str, ...]
    size: int = SIZE
    blocks: tuple[int, ...] = BLOCKS
    depths: tuple[int, ...] = DEPTHS
    direct: tuple[bool, ...] = (True, False)
    operations: tuple[str, ...] = OPERATIONS
    trials: int = 3
    dd: bool = True
    """Measure `dd`, too, where there is one."""

    def __post_init__(self) -> None:
        if not (self.paths and self.blocks and self.depths and self.direct and self.operations):
            raise UsageError("a sweep needs a path, a block size, a depth, an operation, and direct or not")
        if self.trials < 1 or max(self.depths) > MOST_THREADS or min(self.depths) < 1:
            raise UsageError(
                f"{self.trials} trials, depths {list(self.depths)}: use 1 or more, and depths from 1 to {MOST_THREADS}"
            )

    @property
    def settings(self) -> list[IoSetting]:
        """Every combination, with whole blocks of the alignment."""
        blocks = dict.fromkeys(aligned(block) for block in self.blocks)
        return [IoSetting(block, depth, each) for each in self.direct for block in blocks for depth in self.depths]

    @property
    def has_dd(self) -> bool:
        """Whether `dd` is measured: past the page cache only, and where it is installed."""
        return self.dd and True in self.direct and shutil.which("dd") is not None

    @property
    def count(self) -> int:
        """How many timings there will be."""
        of_dd = len({setting.block for setting in self.settings}) if self.has_dd else 0
        return (len(self.settings) + of_dd) * len(self.operations)


def measure(sweep: IoSweep, *, check: bool = False) -> Iterator[IoTiming]:
    """The timings one by one. With `check`, what is read is compared with what was written."""
    with ExitStack() as stack:
        folders = [SwapFolder(path) for path in sweep.paths]
        stack.callback(lambda: [folder.close() for folder in folders])
        block = max(setting.block for setting in sweep.settings) * len(folders)
        disk = _Disk([folder.path / "bench" for folder in folders], -(-sweep.size // block) * block)
        stack.callback(disk.close)
        disk.prepare(sweep.paths)
        if sweep.has_dd:
            yield from disk.measure_dd(sweep)
        for setting in sweep.settings:
            yield from disk.measure(setting, sweep, check)


class _Disk:
    """One file on each path, and a memory that goes there and back."""

    def __init__(self, names: Sequence[Path], size: int) -> None:
        self.names, self.size = names, size
        self.memory = memoryview(b"")
        self.files: list[DirectFile] = []

    def prepare(self, paths: Sequence[str]) -> None:
        """Fill the memory with what no disk can compress, and write it once."""
        needed = sum(os.stat(name.parent).st_dev == os.stat(self.names[0].parent).st_dev for name in self.names)
        if (needed := self.size * needed // len(self.names)) > (free := free_bytes(self.names[0])):
            raise FileError(
                f"{needed:,} bytes are written to {paths[0]}, and {free:,} are free there: use a smaller size"
            )
        mapping = mmap.mmap(-1, self.size)
        if "MADV_HUGEPAGE" in vars(mmap):
            mapping.madvise(mmap.MADV_HUGEPAGE)  # as host memory of offload is
        self.memory = memoryview(mapping)
        for place in range(0, self.size, 1 << 20):
            self.memory[place : place + (1 << 20)] = os.urandom(min(1 << 20, self.size - place))
        self.open(True)
        for file in self.files:
            file.allocate(self.size // len(self.names))
        self.timed("write", IoSetting(min(1 << 20, self.size // len(self.names)), 4))

    def open(self, direct: bool) -> None:
        self.close()
        self.files = [DirectFile(name, direct=direct) for name in self.names]

    def close(self) -> None:
        for file in self.files:
            file.close()
        self.files = []

    def measure(self, setting: IoSetting, sweep: IoSweep, check: bool) -> Iterator[IoTiming]:
        self.open(setting.direct)
        for operation in sorted(sweep.operations, reverse=True):  # what is written is read
            if operation == "read" and check:
                before = bytes(self.memory)
                self.memory[:] = bytes(self.size)
            seconds = tuple(self.timed(operation, setting) for _ in range(sweep.trials))
            if operation == "read" and check and bytes(self.memory) != before:
                raise FileError(f"read {self.names[0]}: what was read is not what was written")
            yield IoTiming(operation, setting, self.size, seconds)

    def timed(self, operation: str, setting: IoSetting) -> float:
        """The seconds of one transfer of everything."""
        work = self.work(operation, setting.block)
        pool = Transfers(setting.depth)
        if operation == "read" and not setting.direct:
            self.forget()
        try:
            pool.start(0, work).wait()  # the threads are there
            began = time.perf_counter()
            pool.start(self.size // setting.block, work).wait()
            if operation == "write" and not setting.direct:
                self.forget()
            return time.perf_counter() - began
        finally:
            pool.close()

    def work(self, operation: str, block: int) -> Callable[[int], None]:
        files, memory = self.files, self.memory

        def run(number: int) -> None:
            row, column = divmod(number, len(files))
            part = memory[number * block : (number + 1) * block]
            if operation == "read":
                files[column].read_into(part, row * block)
            else:
                files[column].write_from(part, row * block)

        return run

    def forget(self) -> None:
        for file in self.files:
            file.leave_cache()

    def measure_dd(self, sweep: IoSweep) -> Iterator[IoTiming]:
        """What `dd` gets on the first path, at every block size.

        It reads before it writes: what it writes are zeros, which a virtual disk may give back faster than other bytes.
        """
        size = self.size // len(self.names)
        for operation in sorted(sweep.operations):
            for block in sorted({setting.block for setting in sweep.settings}):
                seconds = tuple(_dd(operation, self.names[0], block, size) for _ in range(sweep.trials))
                yield IoTiming(operation, IoSetting(block, 1), size, seconds, by="dd")


def _dd(operation: str, name: Path, block: int, size: int) -> float:
    """The seconds that `dd` says it took."""
    ends = [f"if={name}", "of=/dev/null", "iflag=direct"] if operation == "read" else ["if=/dev/zero", f"of={name}"]
    if operation == "write":
        ends += ["oflag=direct", "conv=notrunc"]
    words = ["dd", *ends, f"bs={block}", f"count={size // block}"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, env={"LC_ALL": "C", "PATH": os.defpath})
    took = re.search(r"([0-9.e-]+) s(?:ec|,)", ran.stderr)
    if ran.returncode or took is None:
        raise FileError(f"{' '.join(words)} failed: {ran.stderr.strip()}; --no-dd leaves it out")
    return float(took[1])


def render(found: IoResult) -> Table:
    """The timings as a table: a row for each setting."""
    title = f"{', '.join(found.paths)}: {found.size / 2**20:.0f} MiB in each trial"
    table = Table(title=title, title_justify="left")
    operations = [name for name in OPERATIONS if found.of("mizzen", name)]
    for heading in ("block", "depth", "direct", *(f"{name} GB/s" for name in operations)):
        table.add_column(heading, justify="right")
    rates = {(timing.by, timing.operation, timing.setting): timing.rate for timing in found.timings}
    best = found.best()
    for by, setting in dict.fromkeys((timing.by, timing.setting) for timing in found.timings):
        words = ("dd" if by == "dd" else str(setting.depth), "yes" if setting.direct else "no")
        row = (f"{rates[by, name, setting]:.2f}" for name in operations)
        table.add_row(_size(setting.block), *words, *row, style="bold" if (by, setting) == ("mizzen", best) else None)
    return table


def summary(found: IoResult) -> Iterator[str]:
    """The fastest of each operation, beside `dd` where that was measured."""
    for operation in OPERATIONS:
        if (ours := found.fastest("mizzen", operation)) is None:
            continue
        setting = ours.setting
        text = f"{operation}: {ours.rate:.2f} GB/s with blocks of {_size(setting.block)}, {setting.depth} at once"
        if (theirs := found.fastest("dd", operation)) is not None:
            text += f"; {ours.rate / theirs.rate:.2f} times dd, which gets {theirs.rate:.2f}"
        yield text


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 and not count % (1 << 20) else f"{count / 1024:g} KiB"


def picture(found: IoResult) -> str:
    """The rates over the number of reads or writes at once, as an SVG: a line for each block size, one for `dd`."""
    operations = [name for name in OPERATIONS if found.of("mizzen", name)]
    depths = sorted({timing.setting.depth for timing in found.timings if timing.by == "mizzen"})
    top = max(timing.rate for timing in found.timings) * 1.08
    width = len(operations) * PANEL + LEGEND
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#1c2733">',
        f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="12" y="20" font-size="14">{escape(", ".join(found.paths))}: GB/s, over how many at once</text>',
    ]
    for number, operation in enumerate(operations):
        lines += _panel(found, operation, number * PANEL, depths, top)
    for number, (block, direct) in enumerate(_kinds(found)):
        y = TOP + 18 * number
        lines.append(_line([(width - LEGEND + 14, y), (width - LEGEND + 44, y)], COLORS[number % len(COLORS)], direct))
        words = f"{_size(block)}{'' if direct else ', page cache'}"
        lines.append(f'<text x="{width - LEGEND + 50}" y="{y + 4}">{words}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _kinds(found: IoResult) -> list[tuple[int, bool]]:
    return list(
        dict.fromkeys((timing.setting.block, timing.setting.direct) for timing in found.timings if timing.by != "dd")
    )


def _panel(found: IoResult, operation: str, left: float, depths: Sequence[int], top: float) -> Iterator[str]:
    """One operation: axes, lines, and what `dd` gets."""
    x0, x1, y0, y1 = left + 46, left + PANEL - 16, float(HEIGHT - 40), float(TOP)

    def point(place: int, rate: float) -> tuple[float, float]:
        return x0 + (x1 - x0) * place / max(len(depths) - 1, 1), y0 - (y0 - y1) * rate / top

    yield _line([(x0, y1), (x0, y0), (x1, y0)], "#8794a3", True, 1)
    yield f'<text x="{(x0 + x1) / 2:.0f}" y="{TOP - 8}" text-anchor="middle">{operation}</text>'
    for place, depth in enumerate(depths):
        yield f'<text x="{point(place, 0)[0]:.0f}" y="{y0 + 18:.0f}" text-anchor="middle">{depth}</text>'
    for share in (0.25, 0.5, 0.75, 1.0):
        x, y = x0 - 6, point(0, share * top)[1] + 4
        yield f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="end">{share * top:.2f}</text>'
    for number, kind in enumerate(_kinds(found)):
        rates = {
            timing.setting.depth: timing.rate
            for timing in found.of("mizzen", operation)
            if (timing.setting.block, timing.setting.direct) == kind
        }
        places = [point(depths.index(depth), rate) for depth, rate in sorted(rates.items())]
        yield _line(places, COLORS[number % len(COLORS)], kind[1])
    if (theirs := found.fastest("dd", operation)) is not None:
        y = point(0, theirs.rate)[1]
        yield _line([(x0, y), (x1, y)], "#1c2733", True, 1)
        yield f'<text x="{x1:.0f}" y="{y - 4:.0f}" text-anchor="end">dd</text>'


def _line(places: Sequence[tuple[float, float]], color: str, solid: bool, width: int = 2) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashes = "" if solid else ' stroke-dasharray="4 3"'
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}"{dashes}/>'
