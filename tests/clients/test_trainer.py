"""HF Trainer on an engine gets the losses that it gets from torch's DDP, and a resumed run those of an unbroken one.

Each script is launched once, on two gloo ranks, and does many runs; the tests look at what its ranks have left behind.
"""

import pytest

from clients.launching import close, own_lines


@pytest.fixture(scope="module")
def trainer(scripts, tmp_path_factory):
    return scripts.launch("drive_trainer.py", tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def offloaded(scripts, tmp_path_factory):
    return scripts.launch("drive_trainer_offload.py", tmp_path_factory.mktemp("offloaded"))


@pytest.fixture(scope="module")
def models(scripts, tmp_path_factory):
    return scripts.launch("drive_trainer_models.py", tmp_path_factory.mktemp("models"))


TRAINED = [
    ("stage 0", "ddp"),
    ("stage 1", "ddp"),
    ("stage 2", "ddp"),
    ("stage 2, fused head", "ddp"),
    ("stage 3", "ddp"),
    ("stage 2, optimizer", "ddp, one group"),
    ("stage 2, optimizer and schedule", "ddp, one group, late"),
    ("stage 2, optimizer, offload", "ddp, one group"),
]
NAMES = [name for name, _ in TRAINED]


@pytest.mark.parametrize(("name", "plain"), TRAINED, ids=NAMES)
def test_trainer_gets_what_it_gets_from_ddp(trainer, name, plain):
    for rank in trainer[0]:
        found, expected = rank[name], rank[plain]
        assert len(found["losses"]) == 35  # 20 steps of two micro-batches, 5 of them the short ends of epochs
        assert found["losses"] == close(expected["losses"])
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in found["logs"]] == close([line[key] for line in expected["logs"]])
        assert found["evaluated"] == close(expected["evaluated"])
        assert found["norms"] == close(expected["norms"])
        assert found["predictions"] == pytest.approx(expected["predictions"], rel=1e-4)
        assert found["generated"] == [1, 6]
        assert found["places"] == (["host"] if name.endswith("offload") else ["device"])


@pytest.mark.parametrize(("name", "plain"), TRAINED, ids=NAMES)
def test_trainer_loads_the_best_model_at_the_end(trainer, name, plain):
    for rank in trainer[0]:
        found, expected = rank[name], rank[plain]
        assert found["best"] == [close(expected["best"][0]), expected["best"][1]]
        assert found["evaluated again"] == found["best"][0] < found["evaluated"][-1]


@pytest.mark.parametrize(("name", "plain"), TRAINED, ids=NAMES)
def test_trainer_logs_the_learning_rate(trainer, name, plain):
    rates, expected = ([line["learning_rate"] for line in trainer[0][0][run]["logs"]] for run in (name, plain))
    if "optimizer" in name:  # the engine's step is part of backward, so its schedule has moved on when Trainer looks
        rates, expected = rates[:-1], expected[1:]
    assert max(expected) == 1e-2
    assert rates == close(expected)


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_reports_the_losses_that_trainer_logs(trainer, name):
    """The mean over all tokens of a step, also when an epoch ends in the middle of an accumulation."""
    for rank in trainer[0]:
        assert rank[name]["reported"] == close([line["loss"] for line in rank[name]["logs"]])


@pytest.mark.parametrize("name", NAMES)
def test_trainer_saves_the_model(trainer, name):
    for rank in trainer[0]:
        found = rank[name]
        assert found["saved"] == {key: close(found["norms"][key]) for key in found["saved"]}
        assert found["saved"].keys() == rank["ddp"]["saved"].keys()  # a tied weight is there once


RESUMED = ["ddp", "stage 0", "stage 1", "stage 2", "stage 3", "stage 2, optimizer and schedule"]


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_is_resumed_is_the_run_that_was_not_broken(trainer, name):
    for rank in trainer[0]:
        found, whole = rank[f"{name}, resumed"], rank[name]
        assert found["losses"] == whole["losses"][-17:]
        assert [line["grad_norm"] for line in found["logs"]] == [line["grad_norm"] for line in whole["logs"][10:]]
        assert found["norms"] == whole["norms"]


@pytest.mark.parametrize(("name", "place"), [("behind", "host"), ("on the host", "device")])
def test_the_published_file_with_offload_trains_as_without_it(offloaded, name, place):
    """To the bit, both where a device's memory lies behind copies and on a machine without one."""
    for rank in offloaded[0]:
        found, expected = rank[name], rank["without"]
        assert len(found["losses"]) == 35
        assert found["logs"][-1]["loss"] < found["logs"][0]["loss"]
        for key in ("losses", "reported", "evaluated", "best", "predictions", "norms", "saved"):
            assert found[key] == expected[key], key
        assert [line["grad_norm"] for line in found["logs"]] == [line["grad_norm"] for line in expected["logs"]]
        assert found["saved"] == {key: close(found["norms"][key]) for key in found["saved"]}
        assert (found["shards"], expected["shards"]) == ([place], ["device"])
        assert place in found["places"]


def test_a_run_with_offload_is_resumed(offloaded):
    for rank in offloaded[0]:
        found, whole = rank["resumed"], rank["behind"]
        assert found["losses"] == whole["losses"][-17:]
        assert found["norms"] == whole["norms"]


def test_the_engine_is_silent(trainer):
    told = "passes with the optimizer's states outside the device"  # more than a fifth of a step of such a model
    assert [line for line in own_lines(trainer[1]) if told not in line] == []


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_low_precision_is_the_same_at_every_stage_and_near_ddp(models, kind):
    """DDP has no masters in bf16 and nothing in fp16 on a CPU, so there is no digit to compare; the way is the same."""
    for rank in models[0]:
        runs = [rank[f"stage {stage}, {kind}"] for stage in range(4)]
        assert all(run["losses"] == runs[0]["losses"] for run in runs)
        plain = rank["ddp, bf16" if kind == "bf16" else "ddp, fp32"]
        assert runs[0]["evaluated"] == pytest.approx(plain["evaluated"], rel=2e-2)
        for stage in (2, 3):
            assert rank[f"stage {stage}, {kind}, resumed"]["losses"] == runs[0]["losses"][10:]
        if kind == "fp16":
            assert [run["skipped"] for run in runs] == [5] * 4  # the scale started too high, and came down
            assert [run["scale"] for run in runs] == [runs[0]["scale"]] * 4


KINDS = [(kind, stage) for kind in ("lora", "pretrained", "generation") for stage in ("stage 2", "stage 3")]


@pytest.mark.parametrize(("kind", "name"), [*KINDS, ("lora read", "stage 3")])
def test_other_models_get_what_they_get_from_ddp(models, kind, name):
    for rank in models[0]:
        found, expected = rank[f"{kind}, {name}"], rank[f"{kind}, ddp"]
        assert len(found["losses"]) == 20
        for key in ("losses", "logged", "evaluated", "norms"):
            assert found[key] == close(expected[key]), key
        for key in ("files", "tokens"):
            assert found.get(key) == expected.get(key)


@pytest.mark.parametrize("name", ["ddp", "stage 2", "stage 3"])
def test_adapters_are_saved_and_resumed(models, name):
    for rank in models[0]:
        found, whole = rank[f"lora, {name}, resumed"], rank[f"lora, {name}"]
        assert found["losses"] == whole["losses"][10:]
        assert found["norms"] == whole["norms"]
        assert "adapter_model.safetensors" in whole["files"]


def test_a_model_is_sharded_while_it_is_read_or_made(models):
    for rank in models[0]:
        whole = rank["pretrained, ddp"]["held at first"]
        for name in ("pretrained, stage 3", "made, stage 3", "lora read, stage 3"):
            assert rank[name]["held at first"] < 0.6 * whole
        assert rank["made, stage 3"]["losses"] == close(rank["made, ddp"]["losses"])


def test_a_trainer_that_never_trains_evaluates(models):
    for rank in models[0]:
        found, expected = (rank[f"evaluated at once, {name}"] for name in ("stage 3", "ddp"))
        assert found["evaluated"] == close(expected["evaluated"])
