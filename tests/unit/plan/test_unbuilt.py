"""Every capability that does not exist is refused by the path that asks for it, and by nothing else."""

import pytest

from mizzen.config.load import load
from mizzen.config.schema import Config
from mizzen.config.section import schema_keys
from mizzen.plan.unbuilt import UNBUILT, Unbuilt, refusals

CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
}
GROUPS = {"g": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["*"]}}
QUANTIZED = {"shared_parameters": {"enabled": True}, "different_groups": GROUPS}
PRUNED = {
    "shared_parameters": {"enabled": True},
    "different_groups": {"g": {"params": {"dense_ratio": 0.5}, "modules": ["*"]}},
}
BITS = {"g": {"params": {"bits": 8}, "modules": ["*"]}}
REDUCED = {"enabled": True, "keep_number_layer": 1, "teacher_layer": [0], "module_name_prefix": "h"}
SHARED = "shared_parameters.enabled"


def zero(**keys):
    return {"zero_optimization": {"stage": 2, **keys}}


ASKED = {
    "sequence_parallel_size": {"sequence_parallel_size": 2},
    "expert_parallel.enabled": {"expert_parallel": {"enabled": True}},
    "hybrid_engine.enabled": {"hybrid_engine": {"enabled": True}},
    "compression_training.layer_reduction.enabled": {"compression_training": {"layer_reduction": REDUCED}},
    f"compression_training.weight_quantization.{SHARED}": {"compression_training": {"weight_quantization": QUANTIZED}},
    f"compression_training.activation_quantization.{SHARED}": {
        "compression_training": {"activation_quantization": {**QUANTIZED, "different_groups": BITS}}
    },
    f"compression_training.sparse_pruning.{SHARED}": {"compression_training": {"sparse_pruning": PRUNED}},
    f"compression_training.row_pruning.{SHARED}": {"compression_training": {"row_pruning": PRUNED}},
    f"compression_training.head_pruning.{SHARED}": {
        "compression_training": {"head_pruning": {**PRUNED, "shared_parameters": {"enabled": True, "num_heads": 2}}}
    },
    f"compression_training.channel_pruning.{SHARED}": {"compression_training": {"channel_pruning": PRUNED}},
    "weight_quantization.enabled": {"weight_quantization": {"enabled": True}},
    "weight_quantization.quantized_initialization": {
        "weight_quantization": {"quantized_initialization": {"num_bits": 8}}
    },
    "weight_quantization.post_init_quant": {"weight_quantization": {"post_init_quant": {"fc": {"num_bits": 8}}}},
    "data_efficiency.enabled": {"data_efficiency": {"enabled": True}},
    "curriculum_learning.enabled": {"curriculum_learning": CURRICULUM},
    "autotuning.enabled": {"autotuning": {"enabled": True}},
}
"""For every path that can be refused, a configuration that asks for it and for nothing else."""

HOW = {
    "seq_parallel_communication_data_type": "bf16",
    "zero_optimization": {
        "stage": 1,
        "stage3_model_persistence_threshold": 10,
        "leaf_module": {"classes": ["Expert"]},
        "enable_sanity_checks": True,
        "offload_optimizer": {
            "device": "cpu",
            "cpuadam_cores_perc": 0.5,
        },
    },
}
"""Keys that change how something is done that was not asked for."""

INERT = {
    "what only says how": HOW,
    "nothing": {},
    "stages that exist": {"zero_optimization": {"stage": 1}},
    "offload to nowhere": zero(offload_param={"device": "none"}, offload_optimizer={"device": "none"}),
    "the old name of no offload": zero(cpu_offload=False),
    "flags of ZeRO++ that are off": zero(
        zero_hpz_partition_size=1,
        zero_quantized_weights=False,
        zero_quantized_gradients=False,
        zero_quantized_nontrainable_weights=False,
        zeropp_loco_param=None,
    ),
    "one shard group": zero(mics_shard_size=-1, mics_hierarchical_params_gather=True),
    "precision": {"fp16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "fp16"}},
    "low precision masters and states": {
        **zero(),
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    },
    "one replica": {"data_parallel_replicate_size": 1},
    "degrees of one": {
        "pipeline_parallel_size": 1,
        "sequence_parallel_size": 1,
        "tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}, "tp_overlap_comm": True},
    },
    "experts that are off": {"expert_parallel": {"enabled": False, "autoep_size": 4}},
    "keys that nothing reads": {
        "pipeline": {"stages": 4, "partition": "uniform", "seed_layers": True},
        "checkpoint": {"load_universal": True, "checkpoint_serialization": False},
        "aio": {"single_submit": True},
    },
    "sections at their defaults": {"aio": {"block_size": 1048576}, "checkpoint": {"tag_validation": "Warn"}},
    "compression that is off": {
        "compression_training": {
            "layer_reduction": {"enabled": False, "keep_number_layer": 2},
            "weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": GROUPS},
        },
        "weight_quantization": {"enabled": False},
    },
    "the rest, off": {name: {"enabled": False} for name in ("hybrid_engine", "data_efficiency")},
}


def refused(keys):
    return [refusal.path for refusal in refusals(load(keys))]


@pytest.mark.parametrize("path", ASKED)  # a capability that comes to exist takes its row and its entry with it
def test_each_is_refused_by_name(path):
    assert refused(ASKED[path]) == [path]


@pytest.mark.parametrize("name", INERT)
def test_what_asks_for_nothing_is_not_refused(name):
    assert refused(INERT[name]) == []


def test_every_row_is_tried():
    paths = {f"{row.path}.{switch}" for row in UNBUILT for switch in row.switches}
    paths |= {row.path for row in UNBUILT if row.asks and not row.switches}
    assert paths <= ASKED.keys()


def test_every_row_that_only_says_how_is_tried():
    config = load(HOW)
    for row in UNBUILT:
        if not row.asks:
            assert config.is_given(row.path), row.path


@pytest.mark.parametrize("row", UNBUILT, ids=lambda row: row.path)
def test_every_path_is_one_of_the_schema(row):
    known = {place.path for place in schema_keys(Config)}
    assert row.path in known
    assert {f"{row.path}.{switch}" for switch in row.switches} <= known


def test_a_refusal_names_path_capability_and_way_out():
    (refusal,) = refusals(load(ASKED["hybrid_engine.enabled"]))
    assert str(refusal) == "hybrid_engine.enabled: the hybrid engine is not built yet; leave the key out"


def test_several_at_once_in_the_order_of_the_table():
    keys = {"autotuning": {"enabled": True}, "hybrid_engine": {"enabled": True}, "aio": {"block_size": 3}}
    assert refused(keys) == ["hybrid_engine.enabled", "autotuning.enabled"]


def test_true_is_not_the_number_one():
    """A flag that is true equals the inert degree 1 for Python, and not for us."""
    row = Unbuilt("zero_optimization.zero_quantized_weights", "ZeRO++")
    assert list(row.asked_for(load(zero(zero_quantized_weights=True)), load({}))) == [row.path]
