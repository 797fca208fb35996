"""A client's own tests of this integration, run on the drop-in, and counted by what came of them.

    python tests/clients/own_tests.py CHECKOUT [TESTS ...]

CHECKOUT is the client's source, at the version that is installed; TESTS are files or folders in it, and options of
pytest. Without any it is the place where the known clients keep these tests.
"""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from mizzen.launcher.drop_in import FOLDER

PLACES = (
    "tests/deepspeed",
    "tests/trainer/distributed/test_trainer_distributed_deepspeed.py",
    "tests/tests_pytorch/strategies/test_deepspeed.py",
    "tests/tests_fabric/strategies/test_deepspeed.py",
)
"""Of Accelerate and older versions of Transformers, of newer ones, of Lightning, of Fabric."""
REASONS = {
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
            kind = "skipped" if outcome.tag == "skipped" else "failed"
            found[kind, reason_of(words_of(outcome))] += 1
    return found


def words_of(outcome: ElementTree.Element) -> str:
    """What an outcome says; not the source on the way to it, which names devices of every kind."""
    lines = [line for line in (outcome.text or "").splitlines() if line.startswith("E ")]
    return "\n".join([outcome.get("message", ""), *lines])


def main(words: list[str]) -> int:
    if not words:
        print(__doc__)
        return 2
    checkout, *tests = words
    tests = tests or [place for place in PLACES if (Path(checkout) / place).exists()]
    if not tests:
        print(f"{checkout} has none of {', '.join(PLACES)}: name the tests")
        return 2
    search = [str(FOLDER), str(Path(checkout) / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, search)), "HF_HUB_OFFLINE": "1"}
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        subprocess.run(command, cwd=checkout, env=environment, check=False)
        counts = count(report)
    commit = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    print(f"\n{Path(checkout).resolve().name} at {commit.stdout.strip() or 'no commit'}")
    for (kind, reason), number in sorted(counts.items()):
        print(f"{number:6} {kind}{f': {reason}' if reason else ''}")
    if not counts:
        print("nothing ran: no test matches")
        return 1
    return 1 if any(kind == "failed" for kind, _ in counts) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
