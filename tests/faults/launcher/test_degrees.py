"""Jobs whose ranks share matrices and stages: one rank is killed, or half of them are lost, and the job goes on."""

import json
import signal
from pathlib import Path

import pytest

from breadth import choice
from faults.launcher.test_recovery import curve
from launches import launch, start, wait_until

TRAIN = Path(__file__).with_name("train.py")
STEPS, EVERY, STOP = 10, 4, 6
"""Steps of a job, steps from save to save, and steps that are done when something happens."""
SCRIPT = (TRAIN, "--steps", STEPS, "--every", EVERY, "--tensor", 2, "--stages", 2)
LIMIT = 240
"""Seconds for one job of up to eight ranks where a machine has other work as well."""
ROLES = [f"stage {stage} of 2, tensor rank {rank}" for stage in (0, 1) for rank in (0, 1)]

pytestmark = pytest.mark.timeout(3 * LIMIT)


def starts(folder):
    """Of each start the step it went on from, and its ranks."""
    lines = [line.split(maxsplit=3) for line in (folder / "starts.txt").read_text().splitlines()]
    return [(int(step), int(ranks)) for _, step, ranks, _ in lines]


def losses(folder, rank):
    """Every step that was done, as often as it was done, and its loss."""
    lines = (line.split() for line in (folder / f"loss-{rank}.txt").read_text().splitlines())
    return [(int(step), float.fromhex(loss)) for step, loss in lines]


@pytest.mark.parametrize("killed", [(2,), pytest.param((0, 1, 3), marks=pytest.mark.wide)], ids=str)
def test_ranks_of_any_role_that_are_killed_leave_no_mark_in_the_curve(tmp_path, killed):
    """One in each attempt; with dropout: the random numbers of each role go on where they were."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    words = ("--num_gpus", 4, "--max_restarts", len(killed), *SCRIPT)
    ran = launch(*words, "--out", whole, cwd=tmp_path, timeout=LIMIT)
    assert ran.returncode == 0, ran.stderr
    faults = ",".join(f"kill@{rank}:{STOP}" for rank in killed)
    ran = launch(*words, "--out", broken, "--faults", faults, cwd=tmp_path, timeout=LIMIT)
    assert ran.returncode == 0, ran.stderr
    said = [line for line in ran.stderr.splitlines() if "was ended by signal 9" in line]
    for number, (rank, line) in enumerate(zip(killed, said, strict=True), 1):
        assert line.startswith(f"mizzen: rank {rank} ({ROLES[rank]}) on localhost ")
        assert line.endswith(f"restart {number} of {len(killed)}")
    assert starts(whole) == [(0, 4)] and starts(broken) == [(0, 4), *[(EVERY, 4)] * len(killed)]
    for rank in range(4):
        assert len(curve(whole, rank)) == STEPS and curve(broken, rank) == curve(whole, rank)


@pytest.mark.parametrize("stopped", choice(range(1, 4), [3]))
def test_a_job_of_which_a_rank_is_stopped_and_that_is_preempted_has_the_curve_of_one_that_was_not(tmp_path, stopped):
    """SIGSTOP to one rank, after which the job starts again; then a request to stop, which loses no step."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    words = ("--num_gpus", 4, "--max_restarts", 1, *SCRIPT, "--hang", 4)
    ran = launch(*words, "--out", whole, cwd=tmp_path, timeout=LIMIT)
    assert ran.returncode == 0, ran.stderr
    faults = ("--faults", f"stop@{stopped}:{STOP}")
    job = start(*words, "--out", broken, *faults, "--pause", 1, cwd=tmp_path)
    try:
        found = broken / f"loss-{stopped}.txt"
        wait_until(lambda: found.exists() and f"\n{STOP + 1} " in found.read_text(), f"step {STOP + 1}", LIMIT)
        job.signal(signal.SIGTERM)
        assert job.end(LIMIT) == 75, job.text
    finally:
        job.process.kill()
    role = f"rank {stopped} ({ROLES[stopped]})"
    assert f"{role}: the process is stopped (SIGSTOP)" in job.text and f"{role} on localhost hung" in job.text
    assert "restart 1 of 1" in job.text and "saved and stopped" in job.text
    last = max(curve(broken))
    assert last < STEPS, "the request came before the end"
    ran = launch(*words, "--out", broken, cwd=tmp_path, timeout=LIMIT)
    assert ran.returncode == 0, ran.stderr
    assert starts(broken) == [(0, 4), (EVERY, 4), (last, 4)]
    for rank in range(4):
        assert len(curve(whole, rank)) == STEPS and curve(broken, rank) == curve(whole, rank)


@pytest.mark.parametrize(
    ("local", "layouts", "before", "after"),
    [
        (2, [{"ranks": 2, "pipeline_parallel_size": 2}], (2, 2, 1), (1, 2, 1)),
        pytest.param(2, [{"ranks": 2, "autotp_size": 2}], (2, 2, 1), (2, 1, 1), marks=pytest.mark.wide),
        pytest.param(4, [], (2, 2, 2), (2, 2, 1), marks=pytest.mark.wide),
    ],
    ids=["another layout", "one stage", "fewer data ranks"],
)
def test_a_job_that_loses_a_node_goes_on_at_the_degrees_for_half_of_its_ranks(
    tmp_path, port, local, layouts, before, after
):
    """From the last checkpoint, with the losses of one process, in the same order of the data."""
    alone = tmp_path / "alone"
    alone.mkdir()
    rest = (*SCRIPT, "--layouts", json.dumps([*layouts, {"ranks": 1}]), "--out")
    ran = launch("--num_gpus", 1, *rest, alone, cwd=tmp_path, timeout=LIMIT)
    assert ran.returncode == 0, ran.stderr

    own = ("--no_ssh", "--num_nodes", 2, "--num_gpus", local, "--min_elastic_nodes", 1, "--max_elastic_nodes", 2)
    own += ("--max_restarts", 0, "--master_addr", "127.0.0.1", "--master_port", port)
    faults = ("--faults", f"stop@{2 * local - 1}:{STOP}")  # so that the node is lost at a known step
    first, second = nodes = [
        start(*own, "--node_rank", node, *rest, tmp_path, *faults, cwd=tmp_path, name=f"node{node}") for node in (0, 1)
    ]
    try:
        wait_until((tmp_path / "fault.txt").exists, f"step {STOP}", LIMIT)
        second.signal(signal.SIGKILL)
        assert first.end(LIMIT) == 0, first.text
    finally:
        for node in nodes:
            node.process.kill()
    assert "node 1 (node1) is lost: its supervisor has ended without a word: the ranks start again" in first.text
    said = ["tensor {} x stages {} x data {}".format(*degrees) for degrees in (before, after)]
    assert [line for line in first.text.splitlines() if line.startswith("tensor ")] == said
    assert starts(tmp_path) == [(0, 2 * local), (EVERY, local)]
    expected = dict(losses(alone, 0))
    for rank in range(local):
        steps, found = zip(*losses(tmp_path, rank), strict=True)
        assert steps[:EVERY] == (*range(1, EVERY + 1),) and steps[EVERY - STEPS :] == (*range(EVERY + 1, STEPS + 1),)
        assert found == pytest.approx([expected[step] for step in steps], rel=1e-5)
