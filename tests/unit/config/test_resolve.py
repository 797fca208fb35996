"""Layout and batch from one configuration at many world sizes, and what does not fit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mizzen.config import load
from mizzen.config.layout import Layout
from mizzen.config.resolve import Batch, resolve
from mizzen.errors import ConfigError, LayoutError

ELASTIC = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.1}
EXAMPLES = Path(__file__).parents[3] / "examples" / "configs"


@pytest.mark.parametrize("world", [1, 2, 8, 64])
def test_the_same_file_fits_many_worlds(world):
    found = resolve(load({"train_batch_size": 64, "zero_optimization": {"stage": 2}}), world)
    assert found.layout == Layout(dp_shard=world)
    assert found.batch == Batch(64, 64 // world, 1, world)


def test_every_degree_is_read():
    keys = {
        "train_micro_batch_size_per_gpu": 2,
        "pipeline_parallel_size": 2,
        "sequence_parallel_size": 2,
        "tensor_parallel": {"autotp_size": 4},
        "expert_parallel": {"enabled": True, "autoep_size": 4},
        "data_parallel_replicate_size": 2,
        "use_data_before_expert_parallelism": True,
        "data_parallel_size": 8,
    }
    found = resolve(load(keys), 128)
    assert found.layout == Layout(pp=2, dp_replicate=2, dp_shard=4, sp=2, tp=4, ep=4, data_before_expert=True)
    assert found.batch == Batch(train=16, micro=2, accumulation=1, dp=8)


def test_tensor_parallelism_in_the_words_of_inference():
    keys = {"train_batch_size": 8, "tensor_parallel": {"tp": {"tp_size": 4}}}
    assert resolve(load(keys), 8).layout == Layout(dp_shard=2, tp=4)


def test_expert_parallelism_that_is_off_takes_no_ranks():
    keys = {"train_batch_size": 8, "expert_parallel": {"enabled": False, "autoep_size": 4}}
    assert resolve(load(keys), 2).layout == Layout(dp_shard=2)


def test_a_shard_group_makes_replicas():
    found = resolve(load({"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": 2}}), 8)
    assert found.layout == Layout(dp_replicate=4, dp_shard=2)
    assert found.config.data_parallel_replicate_size == 4
    assert str(found.origins["data_parallel_replicate_size"]) == "derived from zero_optimization.mics_shard_size"


def test_derived_values_are_in_the_config_with_their_origin():
    given = load({"train_batch_size": 64, "gradient_accumulation_steps": 2})
    found = resolve(given, 8)
    assert found.config.train_micro_batch_size_per_gpu == 4
    assert found.config.data_parallel_size == 8
    origins = {key: str(origin) for key, origin in found.origins.items()}
    assert origins["train_batch_size"] == "given"
    assert origins["train_micro_batch_size_per_gpu"] == (
        "derived from train_batch_size and gradient_accumulation_steps with dp = 8"
    )
    assert origins["data_parallel_size"] == "derived from 8 ranks"
    assert origins["gradient_clipping"] == "default"
    assert found.config.is_given("train_batch_size")
    assert not found.config.is_given("data_parallel_size")


def test_what_was_handed_in_is_not_changed():
    given = load({"train_batch_size": 64})
    resolve(given, 8)
    assert given.train_micro_batch_size_per_gpu is None
    assert given.data_parallel_size is None
    assert given.origin("data_parallel_size").kind == "default"


@pytest.mark.parametrize(
    "keys", [{"train_batch_size": 64}, {"elasticity": ELASTIC}, {"train_batch_size": 64, "data_parallel_size": 8}]
)
def test_resolving_twice_changes_nothing(keys):
    once = resolve(load(keys), 8)
    again = resolve(once.config, 8)
    assert again == once
    assert again.origins == once.origins


def test_a_world_that_changes_is_resolved_anew():
    keys = {"zero_optimization": {"stage": 3, "mics_shard_size": 4}, "elasticity": ELASTIC}
    grown = resolve(resolve(load(keys), 8).config, 60)
    assert grown == resolve(load(keys), 60)
    shrunk = resolve(grown.config, 4)
    assert (shrunk.layout.dp_replicate, shrunk.batch.dp) == (1, 4)
    assert shrunk.origins["data_parallel_replicate_size"].kind == "default"


def test_elasticity_sets_the_triad():
    found = resolve(load({"elasticity": ELASTIC}), 60)
    assert found.batch == Batch(train=1680, micro=4, accumulation=7, dp=60)
    assert found.config.train_batch_size == 1680
    assert str(found.origins["train_batch_size"]) == "derived from elasticity"


def test_elasticity_counts_model_parallelism():
    section = {**ELASTIC, "version": 0.2, "num_gpus_per_node": 8, "model_parallel_size": 4}
    found = resolve(load({"elasticity": section, "tensor_parallel": {"autotp_size": 4}}), 16)
    assert (found.layout.tp, found.layout.dp) == (4, 4)
    assert found.batch.train == found.batch.micro * found.batch.accumulation * 4


def test_elasticity_wins_over_the_triad_when_told_to():
    keys = {"elasticity": {**ELASTIC, "ignore_non_elastic_batch_info": True}, "train_batch_size": 7}
    found = resolve(load(keys), 60)
    assert found.config.train_batch_size == 1680
    assert found.origins["train_batch_size"].kind == "derived"


def test_elasticity_that_is_off_changes_nothing():
    keys = {"elasticity": {**ELASTIC, "enabled": False}, "train_batch_size": 61}
    assert resolve(load(keys), 61).batch == Batch(61, 1, 1, 61)


@pytest.mark.parametrize(
    ("keys", "world", "kind", "message"),
    [
        ({"train_batch_size": 10}, 4, ConfigError, "10 is not a multiple of dp = 4"),
        ({}, 4, ConfigError, "train_batch_size: no batch size is given"),
        (
            {"train_batch_size": 8, "tensor_parallel": {"autotp_size": 8}},
            12,
            LayoutError,
            "not a multiple of pp*sp*tp = 1*1*8 = 8",
        ),
        (
            {"train_batch_size": 6, "data_parallel_size": 3},
            8,
            ConfigError,
            "data_parallel_size: 3 is not what 8 ranks leave for it, 8",
        ),
        ({"train_batch_size": 8}, 0, LayoutError, "world size=0"),
        (
            {"train_batch_size": 8, "zero_optimization": {"mics_shard_size": 3}},
            8,
            ConfigError,
            "zero_optimization.mics_shard_size: 3 does not divide the 8 data-parallel ranks",
        ),
        (
            {"train_batch_size": 8, "zero_optimization": {"mics_shard_size": 2}, "data_parallel_replicate_size": 2},
            8,
            ConfigError,
            "data_parallel_replicate_size: 2 is not what zero_optimization.mics_shard_size = 2 makes of 8",
        ),
        ({"train_batch_size": 8, "expert_parallel": {"enabled": True, "autoep_size": 3}}, 8, LayoutError, "ep=3"),
        (
            {"train_batch_size": 8, "elasticity": ELASTIC},
            8,
            ConfigError,
            "train_batch_size: given although elasticity.enabled derives the batch: leave it out, "
            "or set elasticity.ignore_non_elastic_batch_info to true",
        ),
        (
            {"elasticity": ELASTIC, "tensor_parallel": {"autotp_size": 2}},
            8,
            ConfigError,
            "elasticity.model_parallel_size: 1 is not the number of ranks that share one copy of the model, 2: "
            "set it to 2 and elasticity.version to 0.2",
        ),
        ({"elasticity": ELASTIC}, 61, LayoutError, "61 GPUs cannot share the elastic batch of 1680"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(keys, world, kind, message):
    with pytest.raises(kind) as caught:
        resolve(load(keys), world)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "world", "layout"),
    [
        ("zero2_bf16", 8, Layout(dp_shard=8)),
        ("zero3_offload", 4, Layout(dp_shard=4)),
        ("3d", 512, Layout(pp=4, dp_shard=16, tp=8)),
        ("elastic", 60, Layout(dp_shard=60)),
    ],
)
def test_the_examples_fit(name, world, layout):
    assert resolve(load(EXAMPLES / f"{name}.json"), world).layout == layout


WHOLE = [path for path in sorted(EXAMPLES.iterdir()) if "auto" not in path.read_text()]
"""Those that no client has to complete."""


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_every_example_fits_a_world_of_its_own_size(path):
    config = load(path)
    world = 512 if config.pipeline_parallel_size > 1 else 2
    assert resolve(config, world).layout.world == world


def test_resolving_loads_no_torch():
    code = (
        "import sys; from mizzen.config import load; from mizzen.config.resolve import resolve; "
        "resolve(load({'train_batch_size': 8}), 8); sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parents[1] / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
