"""Lightning and Fabric, with their check for CUDA set aside by the script; as in `test_trainer.py`."""

import pytest

from clients.launching import close


@pytest.fixture(scope="module")
def lightning(scripts, tmp_path_factory):
    return scripts.launch("drive_lightning.py", tmp_path_factory.mktemp("lightning"))[0]


TRAINED = {
    "stage 1": "ddp",
    "stage 2": "ddp",
    "stage 3": "ddp",
    "stage 3, late": "ddp",
    "stage 2, accumulated": "ddp, accumulated",
    "stage 3, accumulated": "ddp, accumulated",
    "fabric, stage 1": "fabric, ddp",
    "fabric, stage 2": "fabric, ddp",
    "fabric, stage 3": "fabric, ddp",
}


@pytest.mark.parametrize("name", TRAINED)
def test_it_gets_what_it_gets_from_ddp(lightning, name):
    for rank in lightning:
        found, expected = rank[name], rank[TRAINED[name]]
        assert len(found["losses"]) == (40 if name.endswith("accumulated") else 20)
        for key in ("losses", "norms", "validated"):
            assert found.get(key) == (close(expected[key]) if key in expected else None), key


@pytest.mark.parametrize("name", ["ddp", "ddp, accumulated", "fabric, ddp", "stage 2, bf16", *TRAINED])
def test_a_run_that_is_resumed_is_the_run_that_was_not_broken(lightning, name):
    for rank in lightning:
        found = rank[name]
        assert found["resumed"] == found["losses"][len(found["losses"]) // 2 :]
        if "resumed norms" in found:
            assert found["resumed norms"] == found["norms"]
        if "state" in found:
            assert found["state"] == [10, {"a": [1, 2]}]


def test_bf16_is_near_ddp(lightning):
    """DDP has no masters: what it gets in bf16 is near, and not equal."""
    for rank in lightning:
        assert rank["stage 2, bf16"]["losses"] == pytest.approx(rank["ddp, bf16"]["losses"], rel=5e-3)


@pytest.mark.parametrize("name", [name for name in TRAINED if not name.startswith("fabric")])
def test_a_checkpoint_becomes_one_file_and_a_module(lightning, name):
    for rank in lightning:
        found = rank[name]["converted"]
        assert rank[name]["is folder"]
        assert found["step"] == 10
        assert {"state_dict", "hyper_parameters", "lr_schedulers", "loops"} <= {*found["keys"]}
        assert found["norms"] == rank[name]["saved norms"]
        assert found["norms"] == close(rank[TRAINED[name]]["saved norms"])
        assert found["norms"] != close(rank[TRAINED[name]]["norms"])  # those of the end


@pytest.mark.parametrize("name", ["stage 2", "stage 3"])
def test_the_summary_counts_whole_parameters(lightning, name):
    for rank in lightning:
        found = rank[name]["summary"]
        assert found["total"] == rank["ddp"]["summary"]["total"] == 22_688
        assert ("Params per Device" in found["text"]) == (name == "stage 3")
