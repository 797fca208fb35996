"""The time of the engine's own Python in a step, by samples that see Python and what is below it.

A profiler that follows calls makes each of them slower, and takes what torch does behind an attribute such as `grad`
for Python. py-spy stops a process from outside and looks. The model has as many tensors as a real one, with next to
nothing in them, and one CPU rank: what is sent, and waited for, is not looked at.

    pip install py-spy
    python -m bench.own_time
"""

import argparse
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from bench.gpt import Size
from bench.record import table
from bench.team import Team

HOLLOW: Final = Size(layers=16, width=48, heads=2, vocabulary=64, samples=1, length=8)
"""197 tensors."""
ENGINE: Final = "mizzen/"
FRAME: Final = re.compile(r"\.py:\d+\)$")
"""How py-spy writes a Python function; one of C has its library there."""
SHOWN: Final = 12


@dataclass(slots=True)
class Found:
    """Samples, by whose function was the innermost one of Python."""

    total: int = 0
    python: Counter[str] = field(default_factory=Counter)
    """The engine's, and nothing below it."""
    torch: Counter[str] = field(default_factory=Counter)
    """The engine's, and something that is not Python below it."""


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="the time of the engine's own Python, by samples")
    parser.add_argument("--system", default="mizzen-0", help="(default: mizzen-0)")
    parser.add_argument("--steps", type=int, default=400, help="under samples (default: 400)")
    parser.add_argument("--rate", type=int, default=200, help="samples a second (default: 200)")
    options = parser.parse_args(words)
    if shutil.which("py-spy") is None:
        parser.error("py-spy is not here: pip install py-spy")
    with Team("bench.gpt", options.system, ranks=1, extra={"OMP_NUM_THREADS": "1"}) as team:
        team.ask("prepare", asdict(HOLLOW))
        team.ask("run", 20)
        begin = time.perf_counter()
        team.ask("run", options.steps)
        each = 1000 * (time.perf_counter() - begin) / options.steps
        with tempfile.TemporaryDirectory() as folder:
            raw = Path(folder) / "samples"
            command = f"py-spy record --native --rate {options.rate} --format raw --output {raw} --pid {team.pids[0]}"
            spy = subprocess.Popen(command.split(), stdout=subprocess.DEVNULL)
            team.ask("run", options.steps)
            spy.send_signal(signal.SIGINT)
            spy.wait()
            if not raw.exists():
                parser.error("py-spy has written nothing; what it says is above: it may have to be root")
            found = read(raw.read_text().splitlines())
    print(render(options.system, found, each))
    return 0


def read(lines: Iterable[str]) -> Found:
    """What py-spy has seen: a line is the functions of a stack, outermost first, and how often it was seen."""
    found = Found()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        names = stack.split(";")
        found.total += int(count)
        place = max((at for at, name in enumerate(names) if FRAME.search(name)), default=None)
        if place is not None and ENGINE in names[place]:
            (found.torch if names[place + 1 :] else found.python)[names[place]] += int(count)
    return found


def render(system: str, found: Found, each: float) -> str:
    """The findings, in milliseconds of a step that took `each` without samples."""
    unit = each / max(found.total, 1)
    python, torch = found.python.total(), found.torch.total()
    both = found.python + found.torch
    rows = [
        (name, f"{unit * found.python[name]:.3f}", f"{unit * found.torch[name]:.3f}")
        for name, _ in both.most_common(SHOWN)
    ]
    return "\n\n".join(
        [
            f"## {system}: {each:.1f} ms/step, {found.total} samples",
            f"the engine's own Python {unit * python:.2f} ms, torch called by it {unit * torch:.2f} ms",
            table(["line", "Python ms", "torch ms"], rows),
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
