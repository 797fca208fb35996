"""Rules about several keys: each is broken once, with its exact words, and kept once."""

import pytest

from mizzen.config import load
from mizzen.errors import ConfigError

GROUPS = {"different_groups": {"g": {"params": {"dense_ratio": 0.5}}}}
LTD = {
    "enabled": True,
    "total_layer_num": 24,
    "random_ltd_layer_num": 22,
    "random_ltd_layer_id": [1, 2],
    "random_ltd_schedule": {
        "min_value": 128,
        "max_value": 2048,
        "schedule_config": {"require_steps": 10, "seq_per_step": 16},
    },
}
METRIC = {
    "schedule_type": "fixed_root",
    "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8, "root_degree": 2},
}


def sampling(**sections):
    return {"data_efficiency": {"data_sampling": sections}}


def routing(**changes):
    return {"data_efficiency": {"data_routing": {"random_ltd": {**LTD, **changes}}}}


def curriculum(**changes):
    linear = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 8}}
    return {"curriculum_learning": {"enabled": True, "min_difficulty": 8, "max_difficulty": 64} | linear | changes}


def batch(train, micro=None, accumulation=None, **more):
    sizes = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    return {key: value for key, value in sizes.items() if value is not None} | more


def quantized(start, target, period):
    params = {"start_bits": start, "target_bits": target, "quantization_period": period}
    return {"compression_training": {"weight_quantization": {"different_groups": {"g": {"params": params}}}}}


ELASTIC = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4], "version": 0.1}


RULES = [
    (
        batch(10, 4, 2),
        "train_batch_size: 10 is not a multiple of train_micro_batch_size_per_gpu * gradient_accumulation_steps "
        "= 4 * 2 = 8, on any number of ranks: the nearest that fit are 8 and 16",
        batch(16, 4, 2),
    ),
    (
        batch(10, 4),
        "train_batch_size: 10 is not a multiple of train_micro_batch_size_per_gpu = 4, on any number of ranks: "
        "the nearest that fit are 8 and 12",
        batch(12, 4, "auto"),
    ),
    (
        batch(3, "auto", 8),
        "train_batch_size: 3 is not a multiple of gradient_accumulation_steps = 8, on any number of ranks: "
        "the least that fits is 8",
        batch("auto", "auto", 8),
    ),
    (
        batch(12, 4, data_parallel_size=2),
        "train_batch_size: 12 is not a multiple of train_micro_batch_size_per_gpu * data_parallel_size = 4 * 2 = 8: "
        "the nearest that fit are 8 and 16",
        batch(12, 4, data_parallel_size=3),
    ),
    (
        batch(32, 4, 2, data_parallel_size=2),
        "train_batch_size: 32 is not train_micro_batch_size_per_gpu * gradient_accumulation_steps * dp = 4 * 2 * 2 "
        "= 16: leave one of the three out and it is derived",
        batch(16, 4, 2, data_parallel_size=2),
    ),
    (
        batch(32, elasticity=ELASTIC),
        "train_batch_size: given although elasticity.enabled derives the batch: leave it out, "
        "or set elasticity.ignore_non_elastic_batch_info to true",
        batch(10, 4, 2, elasticity={**ELASTIC, "ignore_non_elastic_batch_info": True}),
    ),
    (
        {"elasticity": {**ELASTIC, "max_train_batch_size": 3}},
        "elasticity.micro_batch_sizes: 4 is above elasticity.max_train_batch_size, 3",
        {"elasticity": ELASTIC},
    ),
    (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16.enabled: given together with bf16.enabled: a model computes in one of the two",
        {"fp16": {"enabled": True}, "bf16": {"enabled": False}},
    ),
    (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        "fp16.fp16_master_weights_and_grads: needs sharded optimizer states: set zero_optimization.stage to 1, 2 or 3",
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, "zero_optimization": {"stage": 1}},
    ),
    (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        "bf16.bf16_master_weights_and_grads: needs sharded optimizer states: set zero_optimization.stage to 1, 2 or 3",
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "zero_optimization": {"stage": 3}},
    ),
    (
        {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
        "bf16.bf16_optimizer_states: needs bf16.bf16_master_weights_and_grads: set it to true",
        {
            "bf16": {"enabled": True, "bf16_optimizer_states": True, "bf16_master_weights_and_grads": True},
            "zero_optimization": {"stage": 2},
        },
    ),
    (
        {"data_types": {"param_dtype": "fp16"}},
        "data_types.param_dtype: fp16 is not the enabled precision, fp32",
        {"data_types": {"param_dtype": "float16"}, "fp16": {"enabled": True}},
    ),
    (
        {"fp16": {"enabled": True, "min_loss_scale": 32, "initial_scale_power": 4}},
        "fp16.min_loss_scale: 32 is above the scale at the start, 2 ** 4",
        {"fp16": {"enabled": True, "min_loss_scale": 32, "initial_scale_power": 4, "loss_scale": 1}},
    ),
    (
        {
            "torch_autocast": {"enabled": True, "dtype": "fp16"},
            "fp16": {"min_loss_scale": 32, "initial_scale_power": 4},
        },
        "fp16.min_loss_scale: 32 is above the scale at the start, 2 ** 4",
        {
            "torch_autocast": {"enabled": True, "dtype": "bf16"},
            "fp16": {"min_loss_scale": 32, "initial_scale_power": 4},
        },
    ),
    (
        {"torch_autocast": {"enabled": True, "dtype": "fp32"}},
        "torch_autocast.dtype: fp32 is no lower format: use bf16 or fp16, or leave the section out",
        {"torch_autocast": {"enabled": False, "dtype": "fp32"}},
    ),
    (
        {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "bf16": {"enabled": True}},
        "torch_autocast.dtype: fp16 is not the enabled precision, bf16",
        {"torch_autocast": {"enabled": True, "dtype": "bf16"}, "bf16": {"enabled": True}},
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
        "optimizer.params.max_grad_norm: no argument of an optimizer: use gradient_clipping",
        {"optimizer": {"type": "Adam"}, "gradient_clipping": 1.0},
    ),
    (
        {"zero_optimization": {"offload_param": {"device": "nvme"}}},
        "zero_optimization.offload_param.nvme_path: needed for device nvme, but absent",
        {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/nvme"}}},
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": ""}}},
        "zero_optimization.offload_optimizer.nvme_path: needed for device nvme, but absent",
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    ),
    (
        {"elasticity": {"enabled": True}},
        "elasticity.max_train_batch_size: needed when elasticity.enabled is true, but absent",
        {"elasticity": {"enabled": False}},
    ),
    (
        {"elasticity": {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": []}},
        "elasticity.micro_batch_sizes: needed when elasticity.enabled is true, but absent",
        {"elasticity": {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2]}},
    ),
    (
        {"elasticity": {"min_gpus": 8, "max_gpus": 4}},
        "elasticity.min_gpus: 8 is above elasticity.max_gpus, 4",
        {"elasticity": {"min_gpus": 4, "max_gpus": 4}},
    ),
    (
        curriculum(min_difficulty=None),
        "curriculum_learning.min_difficulty: needed when curriculum_learning.enabled is true, but absent",
        curriculum(),
    ),
    (
        curriculum(min_difficulty=65),
        "curriculum_learning.min_difficulty: 65 is above curriculum_learning.max_difficulty, 64",
        curriculum(min_difficulty=64),
    ),
    (
        curriculum(schedule_type="fixed_root"),
        "curriculum_learning.schedule_config.root_degree: needed for schedule_type fixed_root, but absent",
        curriculum(schedule_type="custom", schedule_config={}),
    ),
    (
        curriculum(schedule_type="fixed_discrete", schedule_config={"difficulty": [1, 2, 3], "max_step": [5]}),
        "curriculum_learning.schedule_config.max_step: 1 steps do not separate 3 difficulties: give 2",
        curriculum(schedule_type="fixed_discrete", schedule_config={"difficulty": [1, 2, 3], "max_step": [5, 9]}),
    ),
    (
        sampling(curriculum_learning={"enabled": True, "data_cluster_path": "a"}),
        "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics: needed when "
        "data_efficiency.data_sampling.curriculum_learning.enabled is true, but absent",
        sampling(curriculum_learning={"enabled": True, "data_cluster_path": "a", "curriculum_metrics": {"m": METRIC}}),
    ),
    (
        sampling(curriculum_learning={"enabled": True, "data_cluster_path": "a", "curriculum_metrics": {"m": {}}}),
        "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.m.schedule_type: "
        "needed for a curriculum, but absent",
        sampling(curriculum_learning={"enabled": False, "curriculum_metrics": {"m": {}}}),
    ),
    (
        sampling(dynamic_batching={"enabled": True}),
        "data_efficiency.data_sampling.dynamic_batching.max_tokens: needed when "
        "data_efficiency.data_sampling.dynamic_batching.enabled is true, but absent",
        sampling(dynamic_batching={"enabled": True, "max_tokens": 4096}),
    ),
    (
        routing(total_layer_num=None),
        "data_efficiency.data_routing.random_ltd.total_layer_num: needed when "
        "data_efficiency.data_routing.random_ltd.enabled is true, but absent",
        routing(),
    ),
    (
        routing(random_ltd_schedule={"min_value": 1, "max_value": 2}),
        "data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config.require_steps: needed when "
        "data_efficiency.data_routing.random_ltd.enabled is true, but absent",
        routing(enabled=False, random_ltd_schedule={}),
    ),
    (
        {"compression_training": {"layer_reduction": {"enabled": True, "keep_number_layer": 3}}},
        "compression_training.layer_reduction.module_name_prefix: needed when "
        "compression_training.layer_reduction.enabled is true, but absent",
        {
            "compression_training": {
                "layer_reduction": {
                    "enabled": True,
                    "keep_number_layer": 1,
                    "module_name_prefix": "a",
                    "teacher_layer": [1],
                }
            }
        },
    ),
    (
        {"compression_training": {"head_pruning": {"shared_parameters": {"enabled": True}, **GROUPS}}},
        "compression_training.head_pruning.shared_parameters.num_heads: needed when "
        "compression_training.head_pruning.shared_parameters.enabled is true, but absent",
        {"compression_training": {"head_pruning": {"shared_parameters": {"enabled": True, "num_heads": 8}, **GROUPS}}},
    ),
    (
        {"compression_training": {"row_pruning": {"shared_parameters": {"enabled": True}}}},
        "compression_training.row_pruning.different_groups: needed when the technique is enabled, but absent: "
        "give at least one group",
        {"compression_training": {"row_pruning": {"shared_parameters": {"enabled": True}, **GROUPS}}},
    ),
    (
        {
            "compression_training": {
                "weight_quantization": {"different_groups": {"g": {"params": {"start_bits": 4, "target_bits": 8}}}}
            }
        },
        "compression_training.weight_quantization.different_groups.g.params.target_bits: 8 is above start_bits, 4",
        {
            "compression_training": {
                "weight_quantization": {"different_groups": {"g": {"params": {"start_bits": 8, "target_bits": 4}}}}
            }
        },
    ),
    (
        quantized(8, 4, 0),
        "compression_training.weight_quantization.different_groups.g.params.quantization_period: 0 steps between "
        "start_bits, 8, and target_bits, 4: give one or more",
        quantized(8, 8, 0),
    ),
    (
        {"autotuning": {"start_profile_step": 6}},
        "autotuning.start_profile_step: 6 is above autotuning.end_profile_step, 5",
        {"autotuning": {"start_profile_step": 6, "end_profile_step": 7}},
    ),
    (
        {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}},
        "tensor_parallel.autotp_size: 2 is not tensor_parallel.tensor_parallel.tp_size, 4: keep one of the two",
        {"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 4}}},
    ),
]


@pytest.mark.parametrize(("broken", "message", "kept"), RULES, ids=[message[:70] for _, message, _ in RULES])
def test_rule(broken, message, kept):
    with pytest.raises(ConfigError) as caught:
        load(broken)
    assert str(caught.value) == message
    load(kept)


@pytest.mark.parametrize(("given", "value"), [("warn", "Warn"), ("FAIL", "Fail"), ("Ignore", "Ignore")])
def test_words_without_regard_to_case(given, value):
    assert load({"checkpoint": {"tag_validation": given}}).checkpoint.tag_validation == value
    assert load({"gradient_allreduce_op": "SUM", "log_level": "INFO"}).gradient_allreduce_op == "sum"


def test_absence_is_written_in_several_ways():
    for offload in (None, {}, {"device": "none"}, "auto"):
        config = load({"zero_optimization": {"offload_param": offload, "offload_optimizer": offload}})
        assert config.zero_optimization.offload_param is None and config.zero_optimization.offload_optimizer is None
    assert load({"zero_optimization": {"overlap_comm": None}}).zero_optimization.overlap_comm is True
    assert load({"steps_per_print": float("inf"), "optimizer": None}).optimizer is None
