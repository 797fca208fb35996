"""Programs that know nothing of mizzen drive its engine as they drive another one, and get the losses of torch's DDP.

Each script is launched once, on two gloo ranks, and does many runs; the tests look at what its ranks have left behind.
The module that the clients import is the throw-away one in this folder, on the path of the launched processes only.
"""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MISSING = [name for name in ("transformers", "accelerate") if find_spec(name) is None]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the extra clients is not installed: {', '.join(MISSING)}")


def launch(script: str, folder: Path) -> tuple[list[dict], str]:
    """Run a script on two ranks: what each has found, and everything that was written to the terminal."""
    search = [ROOT / "src", ROOT / "tests", HERE / "throwaway"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, search)),
        "PYTHONWARNINGS": "default",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            [*launcher, str(HERE / script), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=240)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    written = (folder / "output").read_text()
    assert code == 0, written[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], written


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return launch("drive_trainer.py", tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory):
    return launch("drive_accelerate.py", tmp_path_factory.mktemp("accelerate"))


def close(value):
    return pytest.approx(value, rel=1e-5, abs=1e-5)


TRAINED = [
    ("stage 0", "ddp"),
    ("stage 1", "ddp"),
    ("stage 2", "ddp"),
    ("stage 2, fused head", "ddp"),
    ("stage 3", "ddp"),
    ("stage 2, optimizer", "ddp, one group"),
    ("stage 2, optimizer and schedule", "ddp, one group, late"),
]


@pytest.mark.parametrize(("name", "plain"), TRAINED, ids=[name for name, _ in TRAINED])
def test_trainer_gets_what_it_gets_from_ddp(trainer, name, plain):
    for rank in trainer[0]:
        found, expected = rank[name], rank[plain]
        assert len(found["losses"]) == 18  # 10 steps, 2 of them the short ends of epochs
        assert found["losses"] == close(expected["losses"])
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in found["logs"]] == close([line[key] for line in expected["logs"]])
        assert found["eval_loss"] == close(expected["eval_loss"])
        assert found["norms"] == close(expected["norms"])
        assert found["predictions"] == pytest.approx(expected["predictions"], rel=1e-4)
        assert found["generated"] == [1, 6]


@pytest.mark.parametrize(("name", "plain"), TRAINED, ids=[name for name, _ in TRAINED])
def test_trainer_logs_the_learning_rate(trainer, name, plain):
    rates, expected = ([line["learning_rate"] for line in trainer[0][0][run]["logs"]] for run in (name, plain))
    if "optimizer" in name:  # the engine's step is part of backward, so its schedule has moved on when Trainer looks
        rates, expected = rates[:-1], expected[1:]
    assert max(expected) == 1e-2
    assert rates == close(expected)


@pytest.mark.parametrize("name", [name for name, _ in TRAINED])
def test_an_engine_reports_the_losses_that_trainer_logs(trainer, name):
    """The mean over all tokens of a step, also when an epoch ends in the middle of an accumulation."""
    for rank in trainer[0]:
        assert rank[name]["reported"] == close([line["loss"] for line in rank[name]["logs"]])


@pytest.mark.parametrize("name", [name for name, _ in TRAINED])
def test_trainer_saves_the_model(trainer, name):
    for rank in trainer[0]:
        assert all(rank[name]["saved"].values())
        assert rank[name]["saved"].keys() == rank["ddp"]["saved"].keys()  # a tied weight is there once


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("maker", ["script", "configuration"])
def test_a_loop_with_accelerate_gets_what_it_gets_from_ddp(accelerate, maker, stage, accumulation):
    for rank in accelerate[0]:
        found = rank[f"{maker}, stage {stage}, {accumulation}"]
        expected = rank[f"{maker}, ddp, {accumulation}"]
        assert len(found["losses"]) == 14
        assert len(found["norms"]) == {1: 14, 2: 8}[accumulation]
        assert max(found["norms"]) > 0.5  # clipping had something to do
        for key in ("losses", "norms", "gathered", "state", "after", "unwrapped"):
            assert found[key] == (close(expected[key]) if key != "unwrapped" else expected[key]), key
        assert not any(found["skipped"])
        assert found["written"][0] == 2.0 > found["written"][1]
        if maker == "script":
            assert found["rates"] == close(expected["rates"])
        else:  # as with Trainer: the schedule is one step ahead when the loop looks
            assert found["rates"][:-1] == close(expected["rates"][1:])


def test_ranks_share_the_samples_when_the_data_is_prepared_after_the_model(accelerate):
    mine, others = (rank["shuffled"] for rank in accelerate[0])
    assert sorted(mine + others) == list(range(32))


@pytest.mark.parametrize("client", ["trainer", "accelerate"])
def test_the_engine_is_silent(request, client):
    """No line of its own, and no warning from its files, beside what the clients write."""
    _, written = request.getfixturevalue(client)
    assert [line for line in written.splitlines() if line.startswith("mizzen") or "src/mizzen" in line] == []
