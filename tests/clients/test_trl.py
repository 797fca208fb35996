"""The trainers of TRL, as in `test_trainer.py`; nothing comes from a model hub."""

import pytest

from clients.launching import close


@pytest.fixture(scope="module")
def trl(scripts, tmp_path_factory):
    return scripts.launch("drive_trl.py", tmp_path_factory.mktemp("trl"))[0]


STEPS = {"sft": 40, "packed": 20, "dpo": 20, "synced": 20, "grpo": 20, "in pieces": 6}
TIMES = ("step_time",)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", STEPS)
def test_a_trainer_gets_what_it_gets_from_ddp(trl, kind, stage):
    for rank in trl:
        found, expected = rank[f"{kind}, stage {stage}"], rank[f"{kind}, ddp"]
        assert len(found["losses"]) == STEPS[kind]
        assert found["losses"] == close(expected["losses"])
        assert found["norms"] == close(expected["norms"])
        for mine, theirs in zip(found["logs"], expected["logs"], strict=True):
            assert mine.keys() == theirs.keys()
            assert mine == {key: pytest.approx(value, rel=1e-4, abs=1e-4) for key, value in theirs.items()} | {
                key: mine[key] for key in TIMES if key in mine
            }


@pytest.mark.parametrize("way", ["ddp", "stage 2", "stage 3"])
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_a_run_that_is_resumed_is_the_run_that_was_not_broken(trl, kind, way):
    for rank in trl:
        found, whole = rank[f"{kind}, {way}, resumed"], rank[f"{kind}, {way}"]
        assert found["losses"] == whole["losses"][len(whole["losses"]) // 2 :]
        assert found["norms"] == whole["norms"]
