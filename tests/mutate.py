"""`make test-mutants`: one line of the core is broken at a time, in a copy, and the tests of `make test` notice.

A mutant is found by its words, wherever they are in `src/mizzen`; when they are not there exactly once, this says so
and fails, and the mutant has to be written anew. `python tests/mutate.py clip rename` makes only those two.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
IGNORED = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", "*.egg-info", "build", ".hypothesis", "runs", "*_cache"
)
CAUGHT, PASSED = 1, 0
"""What pytest returns when a test has failed, and when none has."""


@dataclass(frozen=True)
class Mutant:
    """A broken line: what it is called, what is there, what comes in its place, and the tests that should notice."""

    name: str
    what: str
    there: str
    instead: str
    tests: tuple[str, ...]


GRID = "tests/parity/test_grid.py::test_loss_does_not_depend_on_the_plan"
FILES = "tests/unit/test_files.py"
MUTANTS = (
    Mutant(
        "divisor",
        "gradients are added up, and not divided by the ranks",
        r"divisor=layout\.size\(\*DATA_AXES\)",
        "divisor=1",
        (GRID,),
    ),
    Mutant(
        "fsync",
        "a file is not brought to the disk before its name",
        r'perform\("fsync", path, os\.fsync, file\.fileno\(\)\)',
        "pass",
        (FILES,),
    ),
    Mutant(
        "rename",
        "a file is written over, and not exchanged at once",
        r'perform\("rename", target, os\.replace, source, target\)',
        'target.write_bytes(source.read_bytes()), source.unlink(), perform("rename", target, lambda: None)',
        (FILES,),
    ),
    Mutant(
        "axis",
        "tensor and pipeline parallel ranks change places",
        r'AXES: Final = \("pp", (.*), "tp"\)',
        r'AXES: Final = ("tp", \1, "pp")',
        ("tests/unit/config/test_layout.py",),
    ),
    Mutant(
        "tag",
        "ranks that are at different places in the code exchange their tensors",
        r"if all\(row\[0\] == rows\[0\]\[0\] for row in rows\):",
        "if rows:",
        ("tests/ranks/comm/test_tags.py",),
    ),
    Mutant(
        "beside",
        "a forward does not wait for the step that the host is still at",
        r"self\.beside\.wait\(\)\n        self\._fetch\(\)",
        "self._fetch()",
        ("tests/ranks/offload/test_beside.py",),
    ),
    Mutant(
        "zero",
        "a rank without a gradient steps with what was in the buffer before",
        r"self\.place\(\)\.zero_\(\) if self\.is_empty else self\.place\(\)",
        "self.place()",
        ("tests/unit/parallel/zero", "tests/ranks/parallel/zero/test_gradients.py"),
    ),
    Mutant(
        "broadcast",
        "every rank starts from its own weights",
        r"collectives\.broadcast\(exact, group=self\.group, group_src=0\)",
        "pass",
        ("tests/ranks/parallel/zero/test_store.py",),
    ),
    Mutant(
        "norm",
        "a gradient that all ranks have is counted by each of them",
        r"(\(0, bucket\.master\.numel\(\)\)) if bucket\.is_shared else bucket\.plan\.owned\(.*\)",
        r"\1",
        ("tests/ranks/parallel/zero/test_store.py::test_squares_are_counted_once_whatever_the_stage",),
    ),
    Mutant(
        "clip",
        "the norm is told, and gradients are not clipped",
        r"factor = factor \* \(self\.max_norm / \(norm \+ 1e-6\)\)\.clamp\(max=1\.0\)",
        "pass",
        (GRID,),
    ),
    Mutant(
        "scale",
        "the loss scale stays in the gradients",
        r"\* self\.gain / self\.scale",
        "* self.gain",
        (GRID,),
    ),
    Mutant(
        "finite",
        "a step with a gradient that is not finite is taken",
        r'"" if math\.isfinite\(norm\) else NOT_FINITE',
        '""',
        ("tests/unit/engine/test_vote.py", "tests/ranks/engine/test_vote.py"),
    ),
    Mutant(
        "hash",
        "a checkpoint whose bits have changed is loaded",
        r"if digest\(data\) != self\._entry\.hashes\[number\]:",
        "if False:",
        ("tests/unit/checkpoint/test_files.py",),
    ),
)


def place_of(mutant: Mutant, source: Path = ROOT / "src" / "mizzen") -> Path:
    """The one file that has the words."""
    found = [path for path in sorted(source.rglob("*.py")) for _ in re.finditer(mutant.there, path.read_text())]
    if len(found) != 1:
        names = ", ".join(str(path.relative_to(source)) for path in found) or "nowhere"
        raise SystemExit(f"{mutant.name}: {mutant.there} is to be in one place, and is in {len(found)}: {names}")
    return found[0]


def run(copy: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """How pytest ends in the copy, and the first test that fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("BREADTH", "FULL", "PYTHONPATH")}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-rfE", "--tb=no", "-p", "no:xdist", "-m", "not wide", *tests],
        cwd=copy,
        env=environment | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::\w+)", ran.stdout, re.MULTILINE)
    return ran.returncode, failed[0] if failed else (ran.stdout + ran.stderr)[-500:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *(mutant.name for mutant in MUTANTS)], help="these, not all")
    parser.add_argument("--unbroken", action="store_true", help="first show that the tests pass when nothing is broken")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time, each in a copy of its own")
    given = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not given.names or mutant.name in given.names]
    places = {mutant.name: place_of(mutant) for mutant in chosen}
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.jobs):
            copies.put(Path(shutil.copytree(ROOT, f"{folder}/{number}", symlinks=True, ignore=IGNORED)))
        with ThreadPoolExecutor(given.jobs) as threads:
            caught = list(
                threads.map(lambda mutant: attempt(mutant, places[mutant.name], copies, given.unbroken), chosen)
            )
    print(f"{sum(caught)} of {len(chosen)} mutants were caught")
    return 0 if all(caught) else 1


def attempt(mutant: Mutant, place: Path, copies: "SimpleQueue[Path]", unbroken: bool) -> bool:
    """Break a line in a copy that nobody else uses; whether its tests notice."""
    copy = copies.get()
    path = copy / place.relative_to(ROOT)
    whole = path.read_text()
    try:
        if unbroken and (found := run(copy, mutant.tests))[0] != PASSED:
            print(f"{mutant.name:10} its tests fail when nothing is broken: {found[1]}", flush=True)
            return False
        path.write_text(re.sub(mutant.there, mutant.instead, whole))
        code, seen = run(copy, mutant.tests)
    finally:
        path.write_text(whole)
        copies.put(copy)
    said = "caught by" if code == CAUGHT else "NOT CAUGHT:" if code == PASSED else f"pytest returned {code}:"
    print(f"{mutant.name:10} {mutant.what}\n           {said} {seen if code else ''}", flush=True)
    return code == CAUGHT


if __name__ == "__main__":
    sys.exit(main())
