"""A user's own loop with Accelerate, as in `test_trainer.py`."""

import json
import sys

import pytest

from clients.launching import HERE, close, own_lines, run


@pytest.fixture(scope="module")
def accelerate(scripts, tmp_path_factory):
    return scripts.launch("drive_accelerate.py", tmp_path_factory.mktemp("accelerate"))


@pytest.fixture(scope="module")
def states(scripts, tmp_path_factory):
    return scripts.launch("drive_accelerate_states.py", tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("maker", ["script", "configuration"])
def test_a_loop_gets_what_it_gets_from_ddp(accelerate, maker, stage, accumulation):
    for number, rank in enumerate(accelerate[0]):
        found = rank[f"{maker}, stage {stage}, {accumulation}"]
        expected = rank[f"{maker}, ddp, {accumulation}"]
        assert len(found["losses"]) == 21
        assert len(found["norms"]) == {1: 21, 2: 12}[accumulation]
        assert max(found["norms"]) > 0.5  # clipping had something to do
        for key in ("losses", "norms", "gathered", "after"):
            assert found[key] == close(expected[key]), key
        assert found["unwrapped"].removeprefix("FSDP") == expected["unwrapped"]  # FSDP2 renames classes
        # At stage 3 the first rank alone has all weights.
        assert found["state"] == (close(expected["state"]) if number == 0 or stage < 3 else None)
        assert not any(found["skipped"])
        assert found["written"][0] == 2.0 > found["written"][1]
        if maker == "script":
            assert found["rates"] == close(expected["rates"])
        else:  # as with Trainer: the schedule is one step ahead when the loop looks
            assert found["rates"][:-1] == close(expected["rates"][1:])


def test_ranks_share_the_samples_when_the_data_is_prepared_after_the_model(accelerate):
    mine, others = (rank["shuffled"] for rank in accelerate[0])
    assert sorted(mine + others) == list(range(32))


WAYS = [*(f"arguments, stage {stage}" for stage in range(4)), "file, stage 2", "file, stage 3"]


@pytest.mark.parametrize("name", WAYS)
def test_a_plugin_from_arguments_or_a_file_gets_what_ddp_gets(states, name):
    for number, rank in enumerate(states[0]):
        found, expected = rank[name], rank["ddp"]
        assert len(found["losses"]) == 20
        assert found["losses"] == close(expected["losses"])
        assert found["norms"] == close(expected["norms"])
        assert found["model"] == expected["model"] == ["config.json", "generation_config.json", "model.safetensors"]
        if number == 0 or not name.endswith("3"):  # at stage 3 the first rank alone has all weights
            assert found["state"] == close(expected["state"])
        else:
            assert found["state"] is None


@pytest.mark.parametrize("name", ["ddp", *WAYS])
def test_a_loop_that_loads_its_state_goes_on_as_if_it_had_not_stopped(states, name):
    for rank in states[0]:
        assert rank[f"{name}, resumed"]["losses"] == rank[name]["losses"][10:]
        assert rank[f"{name}, resumed"]["norms"] == rank[name]["norms"]


@pytest.mark.parametrize("name", ["stages 2 and 0", "stages 2 and 3", "stages 3 and 3"])
def test_a_student_learns_from_a_teacher_with_another_plugin(states, name):
    for rank in states[0]:
        for key in ("losses", "norms"):
            assert rank[f"two models, {name}"][key] == close(rank["two models, ddp"][key])


def test_a_model_is_sharded_as_it_is_read_where_the_plugin_says_so(states):
    """`zero3_init_flag`: half of the model on each of two ranks, and the losses of a model that was whole at first."""
    for rank in states[0]:
        plain, whole, sharded = (rank[f"pretrained, {name}"] for name in ("ddp", "whole", "sharded"))
        assert sharded["held"] < 0.6 * whole["held"] == 0.6 * plain["held"]
        assert len(sharded["losses"]) == 20
        for key in ("losses", "norms"):
            assert sharded[key] == whole[key] == close(plain[key])


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate_launch(states, tmp_path, stage):
    """The stage and the rest are told to the launcher; the script says nothing of them."""
    words = ["--num_processes", 2, "--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no"]
    words += ["--use_deepspeed", "--zero_stage", stage, "--gradient_clipping", 0.5, "--gradient_accumulation_steps", 1]
    words += ["--main_process_port", 0, HERE / "drive_accelerate_states.py", tmp_path, "launched"]
    run([sys.executable, "-m", "accelerate.commands.launch", *words], tmp_path)
    for rank, expected in enumerate(states[0]):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["losses"] == close(expected["ddp"]["losses"])
        assert (found["stage"], found["type"]) == (stage, "DistributedType.DEEPSPEED")


@pytest.mark.parametrize("client", ["accelerate", "states"])
def test_the_engine_is_silent(request, client):
    """But for a key of stage 3 that the file of every stage has, which is named once."""
    lines = own_lines(request.getfixturevalue(client)[1])
    assert [line for line in lines if "stage3_gather_16bit_weights_on_model_save has no effect" not in line] == []
