"""What a run leaves behind: results, the machine and its load, as JSON, and tables for people."""

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from bench.paired import Ratio, Turns, ratio, typical


@dataclass(frozen=True, slots=True)
class Result:
    """One system of a run."""

    name: str
    turns: Turns
    """Seconds per step of every round; that of the slowest rank."""
    processor: Turns
    """Seconds of processor time, mean of the ranks: what other programs on the machine hardly change."""
    losses: tuple[float, ...]
    """Mean over the ranks, one for each step, warm-up included; of the last turn where every turn starts anew."""
    peak: int
    """The most bytes that any rank held: resident on a CPU, allocated on a GPU."""
    setup: float
    """Seconds from an imported torch to an engine that can step; the median, if there were several starts."""
    held: int = 0
    """Bytes on a GPU after the last step, the most of any rank."""
    resident: int = 0
    """The most bytes of host memory that any rank had, less what it had before the system was built."""

    @property
    def seconds(self) -> float:
        """A typical step."""
        return typical(self.turns)

    def against(self, other: "Result", of: Literal["turns", "processor"] = "turns") -> Ratio:
        """How long this one takes for what takes the other 1."""
        return ratio(self.turns, other.turns) if of == "turns" else ratio(self.processor, other.processor)


@dataclass(frozen=True, slots=True)
class Record:
    """One run of a bench."""

    bench: str
    settings: Mapping[str, Any]
    results: tuple[Result, ...]
    failures: Mapping[str, str]
    """Systems that were to take part and could not, with the reason."""
    surroundings: Mapping[str, Any]
    """Versions and devices as the players saw them."""
    load: tuple[float, float]
    """Processes that wanted to run in the minute before the first turn, and in the last minute of the run."""
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def result(self, name: str) -> Result | None:
        """The result of one system, if it took part."""
        return next((result for result in self.results if result.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        """Everything, down to the single step."""
        return {
            "bench": self.bench,
            "date": self.date,
            "machine": machine(),
            "surroundings": dict(self.surroundings),
            "load": {"before": self.load[0], "after": self.load[1]},
            "settings": dict(self.settings),
            "systems": {
                result.name: {
                    "seconds_per_step": result.seconds,
                    "turns": [list(turn) for turn in result.turns],
                    "processor": [list(turn) for turn in result.processor],
                    "losses": list(result.losses),
                    "peak_bytes": result.peak,
                    "setup_seconds": result.setup,
                }
                for result in self.results
            },
            "failures": dict(self.failures),
            "ratios": [
                {
                    "of": mine.name,
                    "to": other.name,
                    **asdict(mine.against(other)),
                    "processor": asdict(mine.against(other, "processor")),
                }
                for mine in self.results
                for other in self.results
                if is_ours(mine.name) and not is_ours(other.name)
            ],
        }

    def write(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")


def is_ours(name: str) -> bool:
    """Whether a system is mizzen."""
    return name.startswith("mizzen")


def machine() -> dict[str, Any]:
    """Where this runs."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if "sched_getaffinity" in dir(os) else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _processor() -> str:
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        for line in listed.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def load() -> float:
    """Processes that wanted to run, mean of the last minute."""
    return round(os.getloadavg()[0], 2)


# Tables


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table whose source lines up; all columns but the first are numbers."""
    cells = [list(heads), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    lines = [
        "| " + " | ".join(c.rjust(w) if n else c.ljust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 1) + (":" if n else "-") for n, w in enumerate(widths)) + "|"
    return "\n".join([f"{lines[0]} |", rule, *(f"{line} |" for line in lines[1:])])


def versus(results: Sequence[Result], of: Literal["turns", "processor"] = "turns") -> str:
    """Time of each of our systems where the peer's is 1: below 1 is less than the peer's."""
    ours, others = [r for r in results if is_ours(r.name)], [r for r in results if not is_ours(r.name)]
    if not ours or not others:
        return "nothing to compare: mizzen or the peers did not take part"
    rows = [[other.name, *(mine.against(other, of) for mine in ours)] for other in others]
    head = {"turns": "time, where this is 1", "processor": "processor time, where this is 1"}[of]
    return table([head, *(mine.name for mine in ours)], rows)


def header(record: Record) -> str:
    """Date, machine, versions and load in a few words."""
    where = machine()
    known = ", ".join(f"{name} {value}" for name, value in record.surroundings.items())
    lines = [
        f"{record.bench}, {record.date}",
        f"{where['processor']}, {where['cores']} cores, {where['system']}, Python {where['python']}",
        known,
        f"load average {record.load[0]} before the first turn, {record.load[1]} after the last",
    ]
    return "\n".join([*lines, *(f"{name} did not take part: {why}" for name, why in record.failures.items())])


def equal_losses(results: Iterable[Result], *, decimals: int = 4) -> dict[str, str]:
    """For each system, whether its losses are those of the first one, to so many decimals."""
    found: dict[str, str] = {}
    first: tuple[float, ...] = ()
    for result in results:
        first = first or result.losses
        far = max((abs(a - b) for a, b in zip(result.losses, first, strict=True)), default=0.0)
        found[result.name] = "equal" if far < 0.5 * 10**-decimals else f"off by {far:.1e}"
    return found
