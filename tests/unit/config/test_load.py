"""Whole configurations: those that users bring along load, and broken ones are refused with these exact words."""

import copy
import json
import math

import pytest

from mizzen.ambient import AMBIENT
from mizzen.config import load
from mizzen.config.load import _translate, load_section
from mizzen.errors import ConfigError

BROKEN = [
    ({"gradient_cliping": 1.0}, "gradient_cliping: unknown key; did you mean 'gradient_clipping'?"),
    ({"stage": 2}, "stage: unknown key here; did you mean zero_optimization.stage?"),
    (
        {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
        "zero_optimization.offload_optimizer.devise: unknown key; did you mean 'device'?",
    ),
    ({"scheduler": {"xyz": 1}}, "scheduler.xyz: unknown key; known here: params, type"),
    ({"zero_optimisation.stage": 2}, "zero_optimisation: unknown key; did you mean 'zero_optimization'?"),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: 4 is not one of [0, 1, 2, 3]"),
    ({"zero_optimization": {"stage": True}}, "zero_optimization.stage: true is not a whole number"),
    ({"zero_optimization": {"stage": "2"}}, 'zero_optimization.stage: "2" is not one of [0, 1, 2, 3]'),
    ({"zero_optimization": "on"}, 'zero_optimization: "on" is not an object of keys'),
    ({"zero_optimization": None}, "zero_optimization: null is not an object of keys; leave the key out"),
    (
        {"zero_optimization": {"reduce_bucket_size": 0}},
        "zero_optimization.reduce_bucket_size: 0 is below the least allowed value, 1",
    ),
    (
        {"zero_optimization": {"reduce_bucket_size": "5e8"}},
        'zero_optimization.reduce_bucket_size: "5e8" is not a number',
    ),
    (
        {"zero_optimization": {"offload_param": {"device": "disk"}}},
        'zero_optimization.offload_param.device: "disk" is not one of ["none", "cpu", "nvme"]',
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 1.5}}},
        "zero_optimization.offload_optimizer.ratio: 1.5 is above the largest allowed value, 1",
    ),
    (
        {"zero_optimization": {"legacy_stage1": True}},
        "zero_optimization.legacy_stage1: refused: the old stage 1 does not exist any more; leave the key out",
    ),
    (
        {"zero_optimization": {"zenflow": {"select_interval": "often"}}},
        'zero_optimization.zenflow.select_interval: "often" is not a whole number, nor "auto"',
    ),
    (
        {"zero_optimization": {"zenflow": {"select_interval": 0}}},
        "zero_optimization.zenflow.select_interval: 0 is below the least allowed value, 1",
    ),
    (
        {"zero_optimization": {"leaf_module": {"classes": "Block"}}},
        'zero_optimization.leaf_module.classes: "Block" is not a list',
    ),
    ({"train_batch_size": 0}, "train_batch_size: 0 is below the least allowed value, 1"),
    ({"train_batch_size": 2.5}, "train_batch_size: 2.5 is not a whole number"),
    ({"train_batch_size": True}, "train_batch_size: true is not a whole number"),
    ({"train_batch_size": [8]}, "train_batch_size: [8] is not a whole number"),
    ({"train_batch_size": 10**30}, f"train_batch_size: {10**30} does not fit into 64 bits"),
    ({"train_batch_size": 10**5000}, "train_batch_size: a number of 16610 bits does not fit into 64 bits"),
    ({"gradient_clipping": -1}, "gradient_clipping: -1 is below the least allowed value, 0"),
    ({"gradient_clipping": None}, "gradient_clipping: null is not a number"),
    ({"gradient_clipping": math.nan}, "gradient_clipping: NaN is not a finite number"),
    ({"gradient_clipping": 10**400}, f"gradient_clipping: 1{'0' * 56}... is too large for a number"),
    ({"gradient_predivide_factor": 0}, "gradient_predivide_factor: 0 must be above 0"),
    ({"gradient_allreduce_op": "max"}, 'gradient_allreduce_op: "max" is not one of ["mean", "sum"]'),
    ({"communication_data_type": "int8"}, 'communication_data_type: "int8" is not one of ["fp32", "fp16", "bf16"]'),
    ({"communication_data_type": 16}, 'communication_data_type: 16 is not one of ["fp32", "fp16", "bf16"]'),
    (
        {"log_level": "loud"},
        'log_level: "loud" is not one of ["debug", "info", "warning", "error", "critical"]',
    ),
    ({"wall_clock_breakdown": 1}, "wall_clock_breakdown: 1 is not true or false"),
    ({"wall_clock_breakdown": "true"}, 'wall_clock_breakdown: "true" is not true or false'),
    ({"steps_per_print": -math.inf}, "steps_per_print: -Infinity is not a finite number"),
    (
        {"fp16": {"enabled": True, "initial_scale_power": 200}},
        "fp16.initial_scale_power: 200 is above the largest allowed value, 126",
    ),
    (
        {"amp": {"enabled": True, "opt_level": "O1"}},
        "amp.enabled: refused: apex has been replaced by torch itself; use torch_autocast, bf16 or fp16",
    ),
    (
        {"datastates_ckpt": {"host_cache_size": 16}},
        "datastates_ckpt: refused: the package is not supported; "
        "use checkpoint.async_save, which also writes in the background",
    ),
    (
        {"nebula": {"enabled": True}},
        "nebula.enabled: refused: the service is not supported; use checkpoint.async_save",
    ),
    (
        {"quantize_training": {"enabled": True}},
        "quantize_training.enabled: refused: an old form; use compression_training.weight_quantization",
    ),
    ({"optimizer": {"params": {"lr": 1e-3}}}, "optimizer.type: required here, but absent"),
    ({"optimizer": {"type": 3}}, "optimizer.type: 3 is not a string"),
    ({"optimizer": {"type": ""}}, "optimizer.type: an empty string is not a name"),
    ({"optimizer": {"type": "Adam", "params": {"lr": math.nan}}}, "optimizer.params.lr: NaN is not a finite number"),
    (
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9, math.inf]}}},
        "optimizer.params.betas.1: Infinity is not a finite number",
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"hook": print}}},
        "optimizer.params.hook: a value of type builtin_function_or_method is not a JSON value",
    ),
    ({"optimizer": {"type": "Adam", "params": [1]}}, "optimizer.params: [1] is not an object of keys"),
    (
        {"checkpoint": {"tag_validation": "Maybe"}},
        'checkpoint.tag_validation: "Maybe" is not one of ["Warn", "Ignore", "Fail"]',
    ),
    (
        {"tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": ["("]}]}}},
        'tensor_parallel.partition_config.layer_specs.0.patterns.0: "(" is not a regular expression: '
        "missing ), unterminated subpattern at position 0",
    ),
    (
        {"tensor_parallel": {"partition_config": {"layer_specs": [{"patern": ["x"]}]}}},
        "tensor_parallel.partition_config.layer_specs.0.patern: unknown key; did you mean 'patterns'?",
    ),
    (
        {"tensor_parallel": {"tp": {"mpu": object()}}},
        "tensor_parallel.tensor_parallel.mpu: refused: an object has no place in a configuration; "
        "use initialize(mpu=...)",
    ),
    (
        {"compression_training": {"sparse_pruning": {"different_groups": {"sp1": {"params": {"dense_ratio": 2}}}}}},
        "compression_training.sparse_pruning.different_groups.sp1.params.dense_ratio: "
        "2 is above the largest allowed value, 1",
    ),
    (
        {"compression_training": {"sparse_pruning": {"different_groups": {"sp1": {"modules": ["*"]}}}}},
        "compression_training.sparse_pruning.different_groups.sp1.params: required here, but absent",
    ),
    (
        {"compression_training": {"sparse_pruning": {"different_groups": {"sp1": 3}}}},
        "compression_training.sparse_pruning.different_groups.sp1: 3 is not an object of keys",
    ),
    (
        {"compression_training": {"sparse_pruning": {"different_groups": [1]}}},
        "compression_training.sparse_pruning.different_groups: [1] is not an object of keys",
    ),
    (
        {"expert_parallel": {"load_balance_coeff": 0.1}},
        "expert_parallel.load_balance_coeff: refused: balancing without a loss does not exist; leave it null",
    ),
    ({"elasticity": {"version": 0.3}}, "elasticity.version: 0.3 is not one of [0.1, 0.2]"),
    ({"elasticity": {"micro_batch_sizes": 4}}, "elasticity.micro_batch_sizes: 4 is not a list"),
    (
        {"elasticity": {"micro_batch_sizes": [4, 0]}},
        "elasticity.micro_batch_sizes.1: 0 is below the least allowed value, 1",
    ),
]


@pytest.mark.parametrize(("source", "message"), BROKEN, ids=[str(message)[:60] for _, message in BROKEN])
def test_broken(source, message):
    with pytest.raises(ConfigError) as caught:
        load(source)
    assert str(caught.value) == message
    assert caught.value.path == message.partition(": ")[0]


def test_all_problems_come_in_one_error():
    with pytest.raises(ConfigError) as caught:
        load({"train_batch_size": 0, "gradient_clipping": "a", "fp16": {"enabled": 1}})
    assert str(caught.value) == (
        "fp16.enabled: 1 is not true or false\n"
        '  also gradient_clipping: "a" is not a number\n'
        "  also train_batch_size: 0 is below the least allowed value, 1"
    )
    with pytest.raises(ConfigError) as caught:
        load({"": 1, "optimzer": {}, "k" * 500: 1})
    first, second, third = str(caught.value).split("\n  also ")
    assert first.startswith('"": unknown key; known here: activation_checkpointing, aio, ')
    assert second.startswith(f'"{"k" * 56}...: unknown key')
    assert third == "optimzer: unknown key; did you mean 'optimizer'?"


def test_a_report_without_words_of_ours_keeps_those_of_pydantic():
    problem = {"loc": ("a", 0), "type": "date_type", "msg": "Input should be a date", "input": {"x": "{y}"}}
    assert _translate(problem) == ("a.0", '{"x": "{y}"}: input should be a date')


HF_ZERO_2 = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "amp": {"enabled": "auto", "opt_level": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": None,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": math.inf,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
HF_ZERO_3 = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "aio": {
        "block_size": 262144,
        "queue_depth": 32,
        "thread_count": 1,
        "single_submit": False,
        "overlap_events": True,
    },
    "train_micro_batch_size_per_gpu": 1,
    # a client that builds a reference model writes these beside the section
    "zero_optimization.reduce_bucket_size": 768 * 768,
    "zero_optimization.stage3_param_persistence_threshold": 10 * 768,
    "zero_optimization.stage3_prefetch_bucket_size": 0.9 * 768 * 768,
}
LIGHTNING = {
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False,
    },
    "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True, "thread_count": 1},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 200000000,
        "reduce_bucket_size": 200000000,
        "sub_group_size": 1000000000000,
    },
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True},
}
MEGATRON = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
    "prescale_gradients": True,
    "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": False,
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 64,
        "max_difficulty": 2048,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 60000, "difficulty_step": 8},
    },
    "tensorboard": {"enabled": True, "output_path": "logs/", "job_name": "gpt"},
    "compression_training": {
        "weight_quantization": {
            "shared_parameters": {"enabled": True, "quantization_type": "symmetric", "schedule_offset": 50},
            "different_groups": {
                "wq1": {"params": {"start_bits": 12, "target_bits": 4}, "modules": ["attention.query"]},
                "wq2": {"params": {"start_bits": 8, "target_bits": 8}},
            },
        }
    },
}
CHAT = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none"},
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False,
        "zero_hpz_partition_size": 1,
        "zero_quantized_nontrainable_weights": False,
    },
    "fp16": {"enabled": True, "loss_scale_window": 100},
    "hybrid_engine": {"enabled": True, "max_out_tokens": 512, "tp_gather_partition_size": 8},
    "tensorboard": {"enabled": False},
}
OLD = {
    "train_batch_size": 32,
    "fp32_allreduce": True,
    "zero_optimization": True,
    "allgather_size": 1e8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
    "sparse_attention": {"mode": "fixed", "block": 16, "num_local_blocks": 4},
    "vocabulary_size": 50257,
}


@pytest.mark.parametrize(
    "source",
    [{}, HF_ZERO_2, HF_ZERO_3, LIGHTNING, MEGATRON, CHAT, OLD],
    ids=["empty", "hf2", "hf3", "lightning", "megatron", "chat", "old"],
)
def test_what_users_bring_along_loads_and_is_not_changed(source):
    before = copy.deepcopy(source)
    config = load(source)
    assert source == before
    assert load(json.dumps(source)) == config


def test_values_arrive():
    two, three, megatron, old = load(HF_ZERO_2), load(HF_ZERO_3), load(MEGATRON), load(OLD)
    assert two.zero_optimization.offload_optimizer is None and two.zero_optimization.offload_param is None
    assert two.zero_optimization.reduce_bucket_size == 200_000_000
    assert two.optimizer.params == {} and two.scheduler.type == "WarmupLR" and two.steps_per_print is None
    assert two.fp16.enabled is False and two.gradient_clipping == 1.0 and two.train_batch_size is None
    assert three.zero_optimization.offload_param.nvme_path == "/local_nvme"
    assert three.zero_optimization.reduce_bucket_size == 589_824
    assert three.zero_optimization.stage3_prefetch_bucket_size == 530_841
    assert three.aio.intra_op_parallelism == 1
    group = megatron.compression_training.weight_quantization.different_groups["wq1"]
    assert (group.params.target_bits, group.modules) == (4, ("attention.query",))
    assert megatron.at("compression_training.weight_quantization.different_groups.wq2.modules.0") == "*"
    assert old.zero_optimization.stage == 1 and old.zero_optimization.allgather_bucket_size == 100_000_000
    assert old.communication_data_type == "fp32"


def test_origins():
    config = load(HF_ZERO_3)
    assert str(config.origin("zero_optimization.stage")) == "given" and config.is_given("bf16.enabled")
    assert str(config.origin("aio.intra_op_parallelism")) == "given as aio.thread_count"
    assert str(config.origin("gradient_clipping")) == "default"
    assert not config.is_given("gradient_clipping")
    auto = load({"gradient_clipping": "auto", "optimizer": {"type": "Adam", "params": {"lr": "auto"}}})
    assert str(auto.origin("gradient_clipping")) == 'default asked for as "auto"'
    assert str(auto.origin("optimizer.params.lr")) == 'default asked for as "auto"'
    offloaded = load({"zero_optimization": {"cpu_offload": True}})
    assert str(offloaded.origin("zero_optimization.offload_optimizer.device")) == (
        "given as zero_optimization.cpu_offload"
    )
    assert load({"bfloat16": {"enabled": True}}).is_given("bf16.enabled")


def test_keys_of_a_precision_that_is_not_enabled_are_told(caplog):
    AMBIENT.warned.clear()
    idle = {"fp16": {"loss_scale": 128, "hysteresis": 2}, "torch_autocast": {"enabled": False, "dtype": "fp16"}}
    with caplog.at_level("WARNING", logger="mizzen"):
        load(idle)
    assert caplog.messages == [
        "fp16.loss_scale has no effect here: fp16.enabled is absent; "
        "torch_autocast.dtype has no effect here: torch_autocast.enabled is false"
    ]
    caplog.clear()
    with caplog.at_level("INFO", logger="mizzen"):
        load({"fp16": {"min_loss_scale": 2}, "torch_autocast": {"enabled": True, "dtype": "fp16"}})
        load({"fp16": {"enabled": True, "loss_scale": 256}, "bf16": {"enabled": False}})
    assert caplog.messages == []


def test_layouts_of_fewer_ranks_count_where_elasticity_computes_no_batch(caplog):
    AMBIENT.warned.clear()
    with caplog.at_level("INFO", logger="mizzen"):
        load({"elasticity": {"layouts": [{"ranks": 2, "autotp_size": 2}]}})
        assert caplog.messages == []
        load({"elasticity": {"max_gpus": 4, "layouts": [{"ranks": 2}]}})
    assert caplog.messages == ["elasticity.max_gpus has no effect here: elasticity.enabled is absent"]


def test_a_precision_that_is_auto_is_not_called_false(caplog):
    AMBIENT.warned.clear()
    with caplog.at_level("INFO", logger="mizzen"):
        load({"fp16": {"enabled": "auto", "hysteresis": 4}})
    assert caplog.messages == [
        'fp16.hysteresis has no effect here: fp16.enabled is "auto", which is false unless a client says otherwise'
    ]


def test_a_key_without_effect_is_named_once_and_only_when_it_says_something(caplog):
    AMBIENT.warned.clear()
    with caplog.at_level("INFO", logger="mizzen"):
        load(
            {
                "zero_optimization": {"contiguous_gradients": True},
                "nebula": {"enabled": False},
                "datastates_ckpt": None,
            }
        )
        assert caplog.messages == []
    with caplog.at_level("INFO", logger="mizzen"):
        load({"zero_optimization": {"contiguous_gradients": False}})
        load({"zero_optimization": {"contiguous_gradients": False}})
    assert caplog.messages == [
        "zero_optimization.contiguous_gradients has no effect here: gradients always lie in one contiguous buffer"
    ]


@pytest.mark.parametrize(
    ("config", "path", "reason"),
    [
        (
            {"prescale_gradients": True, "gradient_predivide_factor": 2},
            "gradient_predivide_factor",
            "all of the division comes before the sum",
        ),
        (
            {"use_data_before_expert_parallelism": True},
            "use_data_before_expert_parallelism",
            "expert_parallel.enabled is false",
        ),
        (
            {"zero_optimization": {"stage": 2, "leaf_module": {"names": ["no.such"]}}},
            "zero_optimization.leaf_module.names",
            "stage 3",
        ),
        (
            {"zero_optimization": {"stage": 1, "stage3_prefetch_bucket_size": 5}},
            "zero_optimization.stage3_prefetch_bucket_size",
            "stage 3",
        ),
        ({"flops_profiler": {"profile_step": 5}}, "flops_profiler.profile_step", "flops_profiler.enabled is absent"),
        ({"tensorboard": {"output_path": "x"}}, "tensorboard.output_path", "tensorboard.enabled is absent"),
        ({"comms_logger": {"verbose": True}}, "comms_logger.verbose", "comms_logger.enabled is absent"),
        ({"autotuning": {"tuner_num_trials": 7}}, "autotuning.tuner_num_trials", "autotuning.enabled is absent"),
        (
            {"data_efficiency": {"data_sampling": {"enabled": True}}},
            "data_efficiency.data_sampling.enabled",
            "data_efficiency.enabled is absent",
        ),
        (
            {"seq_parallel_communication_data_type": "bf16"},
            "seq_parallel_communication_data_type",
            "sequence_parallel_size is 1",
        ),
        (
            {"compression_training": {"row_pruning": {"different_groups": {"a": {"params": {"dense_ratio": 0.5}}}}}},
            "compression_training.row_pruning.different_groups.a.params.dense_ratio",
            "compression_training.row_pruning.shared_parameters.enabled is absent",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_key_that_waits_for_another_is_named_where_that_is_absent(caplog, config, path, reason):
    AMBIENT.warned.clear()
    with caplog.at_level("WARNING", logger="mizzen"):
        load(config)
        load(config)
    (line,) = caplog.messages
    assert f"{path} has no effect here: " in line and reason in line


@pytest.mark.parametrize(
    "config",
    [
        {"gradient_predivide_factor": 2},
        {"zero_optimization": {"stage": 3, "leaf_module": {"names": ["a"]}, "stage3_prefetch_bucket_size": 5}},
        {"comms_logger": {"enabled": True, "verbose": True}},
        {"tensorboard": {"enabled": False, "output_path": ""}},
        {"data_efficiency": {"enabled": False}},
    ],
    ids=str,
)
def test_a_key_that_works_is_not_named(caplog, config):
    AMBIENT.warned.clear()
    with caplog.at_level("WARNING", logger="mizzen"):
        load(config)
    assert caplog.messages == []


def test_a_configuration_is_frozen_and_holds_nothing_of_the_caller():
    source = {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.95], "extra": {"a": [1]}}}}
    config = load(source)
    source["optimizer"]["params"]["extra"]["a"].append(2)
    assert config.optimizer.params["extra"] == {"a": (1,)}
    with pytest.raises(TypeError, match="cannot be changed"):
        config.optimizer.params["lr"] = 1.0
    with pytest.raises(ValueError, match="frozen"):
        config.gradient_clipping = 2.0


def test_values_of_numpy_and_torch_count_as_what_they_are():
    numpy = pytest.importorskip("numpy")
    config = load(
        {
            "train_batch_size": numpy.int64(8),
            "gradient_clipping": numpy.float32(0.5),
            "optimizer": {"type": "Adam", "params": {"lr": numpy.float32(0.5), "k": numpy.int64(3)}},
        }
    )
    assert (config.train_batch_size, config.gradient_clipping) == (8, 0.5)
    assert json.dumps(config.optimizer.params) == '{"lr": 0.5, "k": 3}'
    with pytest.raises(ConfigError, match="^train_batch_size: .* is not a finite number"):
        load({"train_batch_size": numpy.float32("nan")})

    class Float16:
        def __str__(self):
            return "torch.float16"

    assert load({"communication_data_type": Float16()}).communication_data_type == "fp16"


def test_at_reads_any_spelling_and_stops_where_nothing_is():
    config = load({"bf16": {"enabled": True}, "amp": {"opt_level": "O2"}, "elasticity": {"micro_batch_sizes": [2, 4]}})
    assert config.at("bfloat16.enabled") is True and config.at("amp.opt_level") == "O2"
    assert config.at("elasticity.micro_batch_sizes.1") == 4
    for path in ("elasticity.micro_batch_sizes.2", "zero_optimization.offload_param.device", "amp.other", "seed.x"):
        assert config.at(path) is None


def test_one_section_can_be_read_without_the_rest():
    mixed = {"_comment": 1, "train_batch_size": 0, "activation_checkpointing": {"profile": True}, "fp16.enabled": True}
    config = load_section(mixed, "activation_checkpointing")
    assert config.activation_checkpointing.profile and config.train_batch_size is None
    assert load_section({"fp16.enabled": True}, "fp16").fp16.enabled
    with pytest.raises(ConfigError, match="activation_checkpointing.profil: unknown key"):
        load_section({"activation_checkpointing": {"profil": True}}, "activation_checkpointing")
