"""A client's own tests of this integration, run on the drop-in, and counted by what came of them.

    python tests/clients/own_tests.py CHECKOUT [TESTS ...]

CHECKOUT is the client's source, at the version that is installed; TESTS are files or folders in it, and options of
pytest. Without any it is the place where the known clients keep these tests. The client and the helpers of its
tests come from the checkout, all else from this environment; the drop-in comes before both.
"""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from mizzen.launcher.job import DROP_IN

PLACES = (
    "tests/deepspeed",
    "tests/trainer/distributed/test_trainer_distributed_deepspeed.py",
    "tests/tests_pytorch/strategies/test_deepspeed.py",
    "tests/tests_fabric/strategies/test_deepspeed.py",
)
"""Of Accelerate and older versions of Transformers, of newer ones, of Lightning, of Fabric."""
REPOSITORY = Path(__file__).parents[2]
REASONS = {
    "needs a package that is not installed": r"no module named '(?!deepspeed\b)",
    "needs a GPU": r"\b(cuda|gpus?|nccl)\b|requires? (an? |multiple |multi-)?accelerator",
    "needs NVMe": r"nvme|aio|libaio",
    "needs a model hub": r"hugging ?face\.co|offline|connection|couldn't connect|can't load|localentrynotfound|hub",
    "needs tensor parallelism": r"autotp|tensor.parallel|tp_size",
    "needs sequence parallelism": r"ulysses|sequence.parallel|alst",
    "a capability that is not built yet": r"not built yet|notbuilt",
}


def reason_of(words: str) -> str:
    """In which class a failure or a skip falls: the first whose words it has."""
    return next((reason for reason, pattern in REASONS.items() if re.search(pattern, words, re.IGNORECASE)), "other")


def count(report: Path) -> Counter:
    """(outcome, reason) -> how many; nothing where pytest has left no report."""
    found = Counter()
    if not report.exists():
        return found
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if outcome is None:
            found["passed", ""] += 1
        else:
            found[kind_of(outcome), reason_of(words_of(outcome))] += 1
    return found


def kind_of(outcome: ElementTree.Element) -> str:
    """A file that could not be imported is one outcome, however many tests it has: it is told apart."""
    if outcome.tag == "error" and outcome.get("message") == "collection failure":
        return "not collected"
    return "skipped" if outcome.tag == "skipped" else "failed"


def words_of(outcome: ElementTree.Element) -> str:
    """What an outcome says; not the source on the way to it, which names devices of every kind."""
    lines = [line for line in (outcome.text or "").splitlines() if line.startswith("E ")]
    return "\n".join([outcome.get("message", ""), *lines])


def surroundings(checkout: Path) -> dict[str, str]:
    """Where the tests and the processes that they start find things.

    Folders are whole paths, because the tests run in another folder than this program. The commands `accelerate` and
    `torchrun` are those of this environment, also when it is not activated. pytest itself adds the checkout.
    """
    search = [str(DROP_IN), str(checkout / "src"), os.environ.get("PYTHONPATH", "")]
    commands = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
        "PATH": os.pathsep.join(filter(None, commands)),
        "HF_HUB_OFFLINE": "1",
    }


def run_tests(checkout: Path, tests: list[str]) -> tuple[int, Counter]:
    """What pytest returned, and what came of each test."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        done = subprocess.run(command, cwd=checkout, env=surroundings(checkout), check=False)
        return done.returncode, count(report)


def main(words: list[str]) -> int:
    if not words:
        print(__doc__)
        return 2
    checkout, tests = Path(words[0]).resolve(), words[1:]
    if not checkout.is_dir():
        print(f"{checkout} is no folder: name the client's checkout")
        return 2
    if checkout.is_relative_to(REPOSITORY):
        print(f"{checkout} lies inside {REPOSITORY}, whose settings of pytest would hold for it: put it beside that")
        return 2
    tests = tests or [place for place in PLACES if (checkout / place).exists()]
    if not tests:
        print(f"{checkout} has none of {', '.join(PLACES)}: name the tests")
        return 2
    returned, counts = run_tests(checkout, tests)
    if "--collect-only" in tests:
        return returned
    commit = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    print(f"\n{checkout.name} at {commit.stdout.strip() or 'no commit'}")
    for (kind, reason), number in sorted(counts.items()):
        print(f"{number:6} {kind}{f': {reason}' if reason else ''}")
    if not counts:
        print("nothing ran: no test matches")
        return 1
    return 1 if any(kind in ("failed", "not collected") for kind, _ in counts) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
