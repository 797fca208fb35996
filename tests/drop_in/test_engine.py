"""Engines made by the drop-in: the losses of mizzen's own, and what clients reach for beside them."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drop_in import programs
from house.tree import ROOT
from mizzen.errors import CheckpointError, ConfigError


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_train_batch_returns_the_loss_of_the_report(world, stage):
    for theirs, ours, kinds in world(2).run(programs.trained, stage):
        assert theirs == ours
        assert kinds == {
            "engine": True,
            "any": True,
            "sharded": stage > 0,
            "stage 1 and 2": stage in (1, 2),
            "stage 3": stage == 3,
            "torch": True,
        }


def test_parameters_have_facts_at_stage_3(world):
    found = world(2).run(programs.facts)
    for early, here, sharded, inside, shards in found:
        assert [row[:2] for row in early] == [(256, (32, 8)), (32, (32,)), (32, (1, 32)), (1, (1,))]
        assert {row[2] for row in early} == {"NOT_AVAILABLE"}
        assert sharded == [True, True, True, False]  # a small one is whole
        assert inside and here == shards
    assert [sum(pair) for pair in zip(found[0][1], found[1][1], strict=True)] == [256, 32, 32, 2]


def test_generation_goes_through_the_hooks_of_stage_3(world):
    (inside, outside), (other, _) = world(2).run(programs.generated)
    assert inside == other == pytest.approx(outside)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_folder_of_checkpoints_looks_as_clients_expect(world, tmp_path, stage):
    (path, client, whole), *_ = world(2).run(programs.saved, str(tmp_path), stage)
    assert (Path(path).name, client) == ("global_step2", {"epoch": 2})
    assert [folder.name for folder in tmp_path.glob("global_step*")] == ["global_step2"]  # the older one has gone
    assert (tmp_path / "latest").read_text().strip() == "global_step2"
    package = programs.deepspeed()
    from deepspeed.utils import zero_to_fp32

    (optimizer,) = zero_to_fp32.get_optim_files(path)
    stub = torch.load(optimizer, weights_only=False)
    assert stub["optimizer_state_dict"]["zero_stage"] == stage
    model = torch.load(zero_to_fp32.get_model_state_file(path, stage), weights_only=False)
    assert (model["epoch"], model["global_steps"]) == (2, 2)
    weights = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert weights.keys() == whole.keys() and all(torch.equal(weights[name], whole[name]) for name in whole)
    with pytest.raises(FileNotFoundError, match="can't find"):
        zero_to_fp32.get_optim_files(tmp_path)
    assert package.__version__


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_is_written_under_the_name_that_scripts_look_for(world, tmp_path, stage):
    whole, _ = world(2).run(programs.exported, str(tmp_path), stage)
    for folder in ("new", "old"):
        (path,) = (tmp_path / folder).iterdir()
        assert path.name == "pytorch_model.bin"
        found = torch.load(path, weights_only=True)
        assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_runs_backward_and_knows_its_learning_rate(world, stage):
    (rates, theirs, ours), _ = world(2).run(programs.stepped_by_hand, stage)
    assert rates == [0.01, 0.25]
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_a_folder_of_deepspeed_is_not_taken_for_an_empty_one(tmp_path):
    package = programs.deepspeed()
    theirs = ROOT / "tests" / "fixtures" / "deepspeed" / "zero2"
    engine = programs.build(package, 0)
    for tag in (None, "step3"):
        with pytest.raises(CheckpointError, match="step3 was saved by DeepSpeed.*mizzen checkpoint import"):
            engine.load_checkpoint(theirs, tag=tag)
    assert engine.load_checkpoint(tmp_path) == (None, None)


def test_the_script_in_the_folder_needs_mizzen_alone(world, tmp_path):
    (path, _, whole), *_ = world(1).run(programs.saved, str(tmp_path), 2)
    ran = subprocess.run(
        [sys.executable, "zero_to_fp32.py", ".", "out", "--safe_serialization"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    from safetensors.torch import load_file

    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_client_s_own_keys_are_told_once_and_a_typo_is_an_error(capfd):
    package = programs.deepspeed()
    from deepspeed.faces.config import without_hints

    hints = {
        "zero_optimization.stage3_prefetch_bucket_size": 7.5,
        "trainer.name": "x",
        "_comment": "for one GPU",
        "comms_config": {"verbose": False},
        "monitor_config": {"enabled": True},
        "train_batch_size": 1,
    }
    assert without_hints(hints).keys() == {"zero_optimization.stage3_prefetch_bucket_size", "train_batch_size"}
    plain = {"train_batch_size": 1}
    assert without_hints(plain) is plain
    for _ in range(2):
        without_hints(hints)
    assert capfd.readouterr().err.count("trainer.name") <= 1
    with pytest.raises(ConfigError, match="gradient_cliping: unknown key; did you mean 'gradient_clipping'"):
        package.initialize(model=programs.Model(), config={**plain, "gradient_cliping": 1.0})
    with pytest.raises(ConfigError, match="fp8: unknown key, which DeepSpeed passes over .* would not compute in fp8"):
        package.initialize(model=programs.Model(), config={**plain, "fp8": {"enabled": True}})


def test_a_client_s_own_keys_are_not_looked_at_wherever_the_configuration_comes_from(tmp_path):
    package = programs.deepspeed()
    settings = {**programs.config(0), "trainer.name": "x", "_comment": "y", "monitor_config": {"enabled": False}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings))
    for source in (settings, path, str(path), path.read_text()):
        for given in (
            {"config": source},
            {"config_params": source},
            {"args": argparse.Namespace(deepspeed_config=source)},
        ):
            engine, *_ = package.initialize(model=programs.Model(), **given)
            assert engine.train_micro_batch_size_per_gpu() == 4
        assert package.DeepSpeedConfig(source).train_micro_batch_size_per_gpu == 4
        with package.zero.Init(config_dict_or_path=source):
            assert programs.Model()
    with pytest.raises(ConfigError, match="given: args.deepspeed_config and config"):
        package.initialize(argparse.Namespace(deepspeed_config=str(path)), programs.Model(), config=settings)


def test_a_key_that_is_no_string_is_told():
    package = programs.deepspeed()
    for start in (lambda config: package.initialize(model=programs.Model(), config=config), package.DeepSpeedConfig):
        with pytest.raises(ConfigError, match="keys are strings, not of type int"):
            start({**programs.config(0), 3: 4})


def dropped(config):
    """A loss with dropout, after the script has seeded torch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))
    engine = programs.deepspeed().initialize(model=model, config={"train_batch_size": 2, **config})[0]
    torch.manual_seed(5)
    return engine(torch.ones(1, 64)).item()


def test_dropout_follows_the_seed_of_the_script(world):
    """As under DDP, to the digit; a file may say otherwise."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))
    torch.manual_seed(5)
    expected = model(torch.ones(1, 64)).item()
    assert world(2).run(dropped, {}) == [expected, expected]
    first, second = world(2).run(dropped, {"dropout_stream": "engine"})
    assert first != second


@pytest.mark.parametrize("is_beside", [True, False])
def test_late_updates_by_the_published_section(world, is_beside):
    for outside, inside, first, last in world(2).run(programs.late, is_beside):
        assert outside == f"ZenFlowZeroOptimizer{'Parallel' if is_beside else 'Sequential'}"
        assert inside == "ZenFlowCPUAdam"
        assert last < 0.7 * first
