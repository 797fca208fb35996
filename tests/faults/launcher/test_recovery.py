"""A short, seeded part of `make faults-launcher`: one job that is killed, hangs, is preempted, and goes on."""

import random
import signal
from pathlib import Path

import pytest

from launches import launch, start, wait_until

TRAIN = Path(__file__).with_name("train.py")
STEPS = 40
"""Far more than are done before the job is asked to stop: that takes a while on a busy machine."""

pytestmark = pytest.mark.timeout(900)


def curve(folder, rank=0):
    """Step -> loss, bit by bit; a step that was done twice must have given the same."""
    found = {}
    for line in (folder / f"loss-{rank}.txt").read_text().splitlines():
        step, loss = line.split()
        assert found.setdefault(int(step), loss) == loss, f"step {step} differs after a restart"
    return found


def test_a_job_that_is_killed_hung_and_preempted_has_the_curve_of_one_that_was_not(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    ran = launch("--num_gpus", 2, TRAIN, "--out", whole, "--steps", STEPS, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr

    chance = random.Random(7)
    faults = (
        f"kill@{chance.randrange(2)}:{chance.randrange(6, 9)},loop@{chance.randrange(2)}:{chance.randrange(11, 14)}"
    )
    words = ("--num_gpus", 2, "--max_restarts", 2, TRAIN, "--out", broken, "--steps", STEPS, "--hang", 4, "--every", 5)
    job = start(*words, "--faults", faults, "--pause", 0.1, cwd=tmp_path)
    try:
        losses = broken / "loss-0.txt"
        wait_until(lambda: losses.exists() and "\n16 " in losses.read_text(), "step 16", 200)
        job.signal(signal.SIGTERM)
        assert job.end() == 75, job.text
    finally:
        job.process.kill()
    assert "was ended by signal 9" in job.text and "restart 1 of 2" in job.text
    assert "hung: rank" in job.text and "train.py" in job.text and "restart 2 of 2" in job.text
    assert "saved and stopped" in job.text

    last = max(curve(broken))
    ran = launch(*words, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    starts = [line.split(maxsplit=3) for line in (broken / "starts.txt").read_text().splitlines()]
    assert [int(start[1]) for start in starts[:3]] == [0, 5, 10]
    assert int(starts[3][1]) == last, "a preempted job loses no step"
    assert starts[3][3] == f"{{'seen': {last}}}", "the client state of the registered callback"
    for rank in (0, 1):
        assert curve(broken, rank) == curve(whole, rank)


@pytest.mark.parametrize(("killed", "stopped"), [(1, 0), pytest.param(0, 1, marks=pytest.mark.wide)])
def test_a_pipeline_whose_stages_are_killed_stopped_and_preempted_has_the_curve_of_one_that_was_not(
    tmp_path, killed, stopped
):
    """SIGKILL to one stage, SIGSTOP to the other, and a request to stop: each is named, and no step differs."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    ran = launch("--num_gpus", 2, TRAIN, "--out", whole, "--steps", STEPS, "--stages", 2, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    words = ("--num_gpus", 2, "--max_restarts", 2, TRAIN, "--out", broken, "--steps", STEPS, "--hang", 4, "--stages", 2)
    faults = f"kill@{killed}:7,stop@{stopped}:12"
    job = start(*words, "--faults", faults, "--pause", 0.1, cwd=tmp_path)
    try:
        losses = broken / "loss-0.txt"
        wait_until(lambda: losses.exists() and "\n15 " in losses.read_text(), "step 15", 200)
        job.signal(signal.SIGTERM)
        assert job.end() == 75, job.text
    finally:
        job.process.kill()
    assert "was ended by signal 9" in job.text and "restart 1 of 2" in job.text
    role = f"rank {stopped} (stage {stopped} of 2)"
    assert f"{role}: the process is stopped (SIGSTOP)" in job.text and f"{role} on localhost hung" in job.text
    assert "restart 2 of 2" in job.text and "saved and stopped" in job.text
    ran = launch(*words, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    for rank in (0, 1):
        assert curve(broken, rank) == curve(whole, rank)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_request_in_a_long_evaluation_saves_there(tmp_path, stage):
    words = ("--out", tmp_path, "--stage", stage, "--every", 1000, "--evaluate", 3, "--batches", 1_000_000)
    job = start("--num_gpus", 2, TRAIN, *words, cwd=tmp_path)
    try:
        wait_until((tmp_path / "evaluating").exists, "the evaluation")
        job.signal(signal.SIGTERM)
        assert job.end() == 75, job.text
    finally:
        job.process.kill()
    assert max(curve(tmp_path)) == 3
    assert (tmp_path / "checkpoints" / "global_step3" / "manifest.json").is_file()


def test_a_request_in_start_up_says_that_nothing_was_saved(tmp_path):
    (tmp_path / "slow.py").write_text("open('up', 'w').close()\nimport time\ntime.sleep(1000)\n")
    job = start("--num_gpus", 1, "slow.py", cwd=tmp_path)
    wait_until((tmp_path / "up").exists, "the rank")
    job.signal(signal.SIGUSR1)
    assert job.end() == 76, job.text
    assert "nothing could be saved" in job.text


DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("up", "w").close()
time.sleep(1000)
"""


def test_grace_ends(tmp_path):
    (tmp_path / "deaf.py").write_text(DEAF)
    job = start("--num_gpus", 1, "--grace", 0.5, "deaf.py", cwd=tmp_path)
    wait_until((tmp_path / "up").exists, "the rank")
    job.signal(signal.SIGTERM)
    assert job.end() == 143, job.text
    assert "have not saved within 0.5 s" in job.text


def test_a_figure_beyond_its_limit_is_a_failure():
    from faults.launcher.figures import Row

    row = Row("R", "", most=2.0, median=0.5)
    for seconds in (1.0, 3.0, None):
        row.case("", lambda _, seconds=seconds: seconds)
    assert [failure[:22] for failure in row.close().failures] == [": 3.00 s, and 2 s are ", "a median of 2.00 s, an"]
