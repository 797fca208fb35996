"""Checkpoints that mean harm: always our error, nothing runs, nothing outside is opened, memory stays small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from unit.checkpoint.foreign.malice import CANARY, CASES, build

HERE = Path(__file__).parent
SOURCE = HERE.parents[3] / "src"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """All cases, opened by a process of their own under an audit hook."""
    root = tmp_path_factory.mktemp("malice") / "cases"
    root.mkdir()
    build(root)
    ended = subprocess.run(
        [sys.executable, str(HERE / "malice.py"), str(root)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=root.parent,
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert not [*root.parent.rglob(CANARY)]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_it_ends_with_our_error(report, case):
    found = report["cases"][case.replace("/", " ")]
    assert found["ended"].startswith("CheckpointError: "), found["ended"]
    assert len(found["ended"]) < 2000


@pytest.mark.parametrize("case", CASES)
def test_nothing_runs_and_nothing_outside_is_opened(report, case):
    assert report["cases"][case.replace("/", " ")]["events"] == []


def test_memory_stays_small(report):
    assert report["megabytes"] < 200


def test_a_refused_name_is_told_with_its_file_and_key(report):
    said = report["cases"]["call os.system"]["ended"]
    assert "model.pt: refused 'os.system' at byte " in said
    assert "after 'module'" in said
