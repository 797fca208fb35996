"""Errors of mizzen, caught as programs catch those of DeepSpeed."""

import pickle

import pytest
import torch
from torch import nn

from drop_in import programs
from mizzen.errors import CheckpointError, ConfigError, LayoutError, MizzenError, UsageError


@pytest.fixture
def package():
    return programs.deepspeed()


ELASTIC = {"enabled": True, "max_train_batch_size": 4, "micro_batch_sizes": [2], "min_gpus": 2, "version": 0.1}


def test_a_model_that_is_none(package):
    with pytest.raises(AssertionError, match="needs model="):
        package.initialize(model=None, config=programs.config(0))


def test_an_error_stays_what_it_is(package):
    with pytest.raises(UsageError) as caught:
        package.initialize(model=None, config=programs.config(0))
    error = caught.value
    assert isinstance(error, AssertionError | ValueError | RuntimeError) and type(error).__name__ == "UsageError"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    from deepspeed.faces.errors import also

    with pytest.raises(CheckpointError) as caught, also(AssertionError), also(KeyError, AssertionError):
        raise CheckpointError("lost")
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, AssertionError) and isinstance(again, KeyError) and again.args == ("lost",)
    with pytest.raises(ConfigError) as caught:
        package.DeepSpeedConfig({"train_batch_size": -1})
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, AssertionError) and again.path == "train_batch_size"


def test_a_wrong_configuration(package):
    for kind in (AssertionError, ValueError, package.DeepSpeedConfigError):
        with pytest.raises(kind, match="train_batch_size"):
            package.DeepSpeedConfig({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4})
        with pytest.raises(kind, match="exactly one of"):
            package.initialize(model=programs.Model())


def test_gradients_that_cannot_stay_on_their_rank(package):
    engine = programs.build(package, 2)
    with pytest.raises(AssertionError, match="stages 0 and 1"), engine.no_sync():
        pass
    other = programs.build(package, 1)
    with pytest.raises(AssertionError, match=r"step\(\) inside no_sync"), other.no_sync():
        other.backward(other(torch.ones(4, 8)))
        other.step()


@pytest.mark.parametrize("kind", [AssertionError, ValueError, MizzenError])
def test_calls_with_wrong_values(package, kind):
    engine = programs.build(package, 0)
    with pytest.raises(kind, match="one element"):
        engine.backward(torch.ones(2, requires_grad=True))
    with pytest.raises(kind, match="tag"):
        engine.save_checkpoint("/tmp", tag="../elsewhere")
    without = package.initialize(model=programs.Model(), config={"train_batch_size": 1})[0]
    with pytest.raises(kind, match="needs an optimizer"):
        without.step()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda runner: runner.parse_resource_filter({"a": [0]}, "a:3"),
        lambda runner: runner.parse_resource_filter({"a": [0]}, "b"),
        lambda runner: runner.parse_resource_filter({"a": [0]}, "a", "a"),
        lambda runner: runner.parse_node_config("a:x"),
    ],
)
def test_filters_of_the_launcher(package, wrong):
    with pytest.raises(ValueError):  # noqa: PT011  (any text: the kind is what is tested)
        wrong(package.launcher.runner)


def test_a_hostfile_with_a_host_twice(package, tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\na slots=2\n")
    with pytest.raises(ValueError, match="a"):
        package.launcher.runner.fetch_hostfile(str(tmp_path / "hosts"))


def test_leaf_modules_that_are_not_there(package):
    from deepspeed import utils

    model = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="Conv1d"):
        utils.set_z3_leaf_modules(model, [nn.Conv1d])
    with pytest.raises(ValueError, match="'7'"):
        utils.set_z3_leaf_modules_by_name(model, ["7"])
    with pytest.raises(AssertionError):
        utils.set_z3_leaf_modules(model, [3])


def test_elastic_world_sizes(package):
    from deepspeed.elasticity import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize

    compute = package.elasticity.compute_elastic_config
    with pytest.raises(ElasticityIncompatibleWorldSize, match="7 GPUs") as caught:
        compute({"elasticity": ELASTIC | {"min_gpus": 1}}, "0.19", world_size=7)
    assert isinstance(caught.value, ElasticityError) and isinstance(caught.value, LayoutError | ConfigError)
    with pytest.raises(ElasticityConfigError, match="elasticity is off"):
        compute({"elasticity": {"enabled": False}}, "0.19")
    with pytest.raises(ElasticityError):
        compute({"elasticity": ELASTIC | {"micro_batch_sizes": [8]}}, "0.19")
    settings = {"elasticity": ELASTIC, "optimizer": {"type": "Adam"}}
    for start in (package.DeepSpeedConfig, lambda config: package.initialize(model=programs.Model(), config=config)):
        with pytest.raises(ElasticityError, match="outside elasticity.min_gpus"):
            start(settings)
    assert not issubclass(ConfigError, ElasticityError)


def test_folders_of_checkpoints(package, tmp_path):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with pytest.raises(ValueError, match="latest|no checkpoint"):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "nowhere"))


def test_a_universal_checkpoint_is_not_taken_for_written(package, tmp_path):
    from deepspeed.checkpoint import ds_to_universal

    words = ["--input_folder", str(tmp_path / "global_step1"), "--output_folder", str(tmp_path / "universal")]
    with pytest.raises(ValueError, match="universal is not written: there is nothing to convert"):
        ds_to_universal.main(ds_to_universal.parse_arguments(words))
    engine = programs.build(package, 0, checkpoint={"load_universal": True})
    with pytest.raises(CheckpointError, match="universal.*needs no conversion"):
        engine.load_checkpoint(str(tmp_path), tag="universal")
    engine.train_batch(programs.batches(1))
    engine.save_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path, tag="global_step1")[0] is not None


CALLERS = {"transformers.trainer": "HF Trainer", "lightning.pytorch.strategies.deepspeed": "Lightning"}


@pytest.mark.parametrize("caller", CALLERS)
def test_stages_are_refused_to_clients_that_cannot_drive_them(package, caller):
    """Whoever calls forward, backward and step itself is named; a script of one's own is not refused by this."""
    config = programs.config(0) | {"pipeline_parallel_size": 2}
    names = {"__name__": caller, "initialize": package.initialize, "model": programs.Model(), "config": config}
    with pytest.raises(UsageError, match=f"pipeline_parallel_size 2 with {CALLERS[caller]}, which calls forward"):
        exec("def prepare():\n    initialize(model=model, config=config)\nprepare()", names)
    with pytest.raises(LayoutError, match="world size 1 is not a multiple"):
        package.initialize(model=programs.Model(), config=config)
