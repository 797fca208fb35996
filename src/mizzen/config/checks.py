"""Rules that concern several keys at once and need no world size, and keys that change nothing where they stand.

Rules about features together belong to the plan.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from mizzen.config.compression import CompressionConfig
from mizzen.config.data import CurriculumMetricConfig, LegacyCurriculumConfig
from mizzen.config.migrate import GivenKey
from mizzen.config.resolve import check_batch
from mizzen.config.schema import Config
from mizzen.config.section import Section, nest_in
from mizzen.errors import ConfigError


def check(config: Config) -> None:
    """Raise a `ConfigError` for the first rule that the configuration breaks."""
    check_batch(config)
    _check_precision(config)
    _check_optimizer(config)
    _check_required(config)
    _check_offload(config)
    _check_curricula(config)
    _check_compression(config.compression_training)
    _check_ranges(config)


def _check_precision(config: Config) -> None:
    fp16, bf16, stage = config.fp16, config.bf16, config.zero_optimization.stage
    if fp16.enabled and bf16.enabled:
        raise ConfigError("fp16.enabled", "given together with bf16.enabled: a model computes in one of the two")
    for path, asked in (
        ("fp16.fp16_master_weights_and_grads", fp16.fp16_master_weights_and_grads),
        ("bf16.bf16_master_weights_and_grads", bf16.bf16_master_weights_and_grads),
    ):
        if asked and stage == 0:
            raise ConfigError(path, "needs sharded optimizer states: set zero_optimization.stage to 1, 2 or 3")
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        raise ConfigError("bf16.bf16_optimizer_states", "needs bf16.bf16_master_weights_and_grads: set it to true")
    enabled = "fp16" if fp16.enabled else "bf16" if bf16.enabled else "fp32"
    asked_dtype = config.data_types.param_dtype
    if asked_dtype not in (None, enabled):
        raise ConfigError("data_types.param_dtype", f"{asked_dtype} is not the enabled precision, {enabled}")
    autocast = config.torch_autocast
    if autocast.enabled and autocast.dtype == "fp32":
        raise ConfigError("torch_autocast.dtype", "fp32 is no lower format: use bf16 or fp16, or leave the section out")
    if autocast.enabled and enabled not in ("fp32", autocast.dtype):
        raise ConfigError("torch_autocast.dtype", f"{autocast.dtype} is not the enabled precision, {enabled}")
    if config.computes_in_fp16 and not fp16.loss_scale and fp16.min_loss_scale > 2.0**fp16.initial_scale_power:
        start = f"2 ** {fp16.initial_scale_power}"
        raise ConfigError("fp16.min_loss_scale", f"{fp16.min_loss_scale:g} is above the scale at the start, {start}")


def _check_optimizer(config: Config) -> None:
    if config.optimizer is not None and "max_grad_norm" in config.optimizer.params:
        raise ConfigError("optimizer.params.max_grad_norm", "no argument of an optimizer: use gradient_clipping")


@dataclass(frozen=True, slots=True)
class _RequiredKeys:
    """Keys of a section that are needed once the section is switched on."""

    section: str
    keys: tuple[str, ...]


_SAMPLING: Final = "data_efficiency.data_sampling"
_LTD: Final = "data_efficiency.data_routing.random_ltd"
_REQUIRED: Final = (
    _RequiredKeys("elasticity", ("max_train_batch_size", "micro_batch_sizes")),
    _RequiredKeys("curriculum_learning", ("min_difficulty", "max_difficulty", "schedule_type")),
    _RequiredKeys(f"{_SAMPLING}.curriculum_learning", ("data_cluster_path", "curriculum_metrics")),
    _RequiredKeys(f"{_SAMPLING}.dynamic_batching", ("max_tokens",)),
    _RequiredKeys(_LTD, ("total_layer_num", "random_ltd_layer_num", "random_ltd_layer_id")),
    _RequiredKeys(
        f"{_LTD}.random_ltd_schedule",
        ("min_value", "max_value", "schedule_config.require_steps", "schedule_config.seq_per_step"),
    ),
    _RequiredKeys("compression_training.layer_reduction", ("keep_number_layer", "module_name_prefix", "teacher_layer")),
    _RequiredKeys("compression_training.head_pruning.shared_parameters", ("num_heads",)),
)


def _check_required(config: Config) -> None:
    for need in _REQUIRED:
        switch = f"{_LTD}.enabled" if need.section.startswith(_LTD) else f"{need.section}.enabled"
        for key in need.keys if config.at(switch) else ():
            if config.at(f"{need.section}.{key}") in (None, (), {}):
                raise ConfigError(f"{need.section}.{key}", f"needed when {switch} is true, but absent")


def _check_offload(config: Config) -> None:
    for path in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        if config.at(f"{path}.device") == "nvme" and not config.at(f"{path}.nvme_path"):
            raise ConfigError(f"{path}.nvme_path", "needed for device nvme, but absent")
    path = "zero_optimization.offload_optimizer.nvme_path"
    if config.at("offload.nvme_bytes") not in (0, "auto") and config.offload is not None and not config.at(path):
        raise ConfigError(path, "needed when offload.nvme_bytes is not 0, with device nvme, but absent")


_SCHEDULE_NEEDS: Final = {
    "fixed_discrete": ("difficulty", "max_step"),
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "custom": (),
}


def _check_curricula(config: Config) -> None:
    for path, curriculum in _curricula(config):
        if curriculum.schedule_type is None:
            raise ConfigError(f"{path}.schedule_type", "needed for a curriculum, but absent")
        for key in _SCHEDULE_NEEDS[curriculum.schedule_type]:
            if curriculum.schedule_config.__dict__[key] is None:
                message = f"needed for schedule_type {curriculum.schedule_type}, but absent"
                raise ConfigError(f"{path}.schedule_config.{key}", message)
        difficulty, steps = curriculum.schedule_config.difficulty, curriculum.schedule_config.max_step
        if curriculum.schedule_type == "fixed_discrete" and difficulty and steps and len(difficulty) != len(steps) + 1:
            message = f"{len(steps)} steps do not separate {len(difficulty)} difficulties: give {len(difficulty) - 1}"
            raise ConfigError(f"{path}.schedule_config.max_step", message)


def _curricula(config: Config) -> Iterator[tuple[str, LegacyCurriculumConfig | CurriculumMetricConfig]]:
    if config.curriculum_learning.enabled:
        yield "curriculum_learning", config.curriculum_learning
    sampling = config.data_efficiency.data_sampling.curriculum_learning
    if sampling.enabled:
        for name, metric in sampling.curriculum_metrics.items():
            yield f"{_SAMPLING}.curriculum_learning.curriculum_metrics.{name}", metric


def _check_compression(compression: CompressionConfig) -> None:
    techniques = (
        ("weight_quantization", compression.weight_quantization),
        ("activation_quantization", compression.activation_quantization),
        ("sparse_pruning", compression.sparse_pruning),
        ("row_pruning", compression.row_pruning),
        ("head_pruning", compression.head_pruning),
        ("channel_pruning", compression.channel_pruning),
    )
    for name, technique in techniques:
        if technique.shared_parameters.enabled and not technique.different_groups:
            path = f"compression_training.{name}.different_groups"
            raise ConfigError(path, "needed when the technique is enabled, but absent: give at least one group")
    for name, group in compression.weight_quantization.different_groups.items():
        path, bits = f"compression_training.weight_quantization.different_groups.{name}.params", group.params
        if bits.target_bits > bits.start_bits:
            raise ConfigError(f"{path}.target_bits", f"{bits.target_bits} is above start_bits, {bits.start_bits}")
        if not bits.quantization_period and bits.target_bits < bits.start_bits:
            message = (
                f"0 steps between start_bits, {bits.start_bits}, and target_bits, {bits.target_bits}: give one or more"
            )
            raise ConfigError(f"{path}.quantization_period", message)


_RANGES: Final = (
    ("elasticity.min_gpus", "elasticity.max_gpus"),
    ("curriculum_learning.min_difficulty", "curriculum_learning.max_difficulty"),
    ("autotuning.start_profile_step", "autotuning.end_profile_step"),
    ("autotuning.min_train_batch_size", "autotuning.max_train_batch_size"),
    ("autotuning.min_train_micro_batch_size_per_gpu", "autotuning.max_train_micro_batch_size_per_gpu"),
    (f"{_SAMPLING}.dynamic_batching.min_batch_size", f"{_SAMPLING}.dynamic_batching.max_batch_size"),
    (f"{_LTD}.random_ltd_schedule.min_value", f"{_LTD}.random_ltd_schedule.max_value"),
    ("expert_parallel.num_limited_groups", "expert_parallel.num_expert_groups"),
)
"""Pairs of keys of which the first may not be above the second."""


def _check_ranges(config: Config) -> None:
    for low, high in _RANGES:
        least, most = config.at(low), config.at(high)
        if least is not None and most is not None and least > most:
            raise ConfigError(low, f"{least} is above {high}, {most}")
    tensor = config.tensor_parallel
    sizes = (tensor.autotp_size, tensor.tensor_parallel.tp_size)
    if min(sizes) > 1 and sizes[0] != sizes[1]:
        message = f"{sizes[0]} is not tensor_parallel.tensor_parallel.tp_size, {sizes[1]}: keep one of the two"
        raise ConfigError("tensor_parallel.autotp_size", message)
    if max(sizes) > 1 and config.tensor_parallel_size > 1:
        message = (
            f"{config.tensor_parallel_size} says, or the mpu does, that the model is split already, and "
            f"tensor_parallel asks to split it over {max(sizes)}: leave that section out"
        )
        raise ConfigError("tensor_parallel_size", message)


class _Condition(NamedTuple):
    """What the keys at or below a path need to have an effect."""

    path: str
    is_met: Callable[[Config], bool]
    reason: str


_AT_STAGE_3: Final = (
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save",
    "leaf_module",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "zeropp_loco_param",
)
_CONDITIONS: Final = (
    *(
        _Condition(
            f"zero_optimization.{key}",
            lambda config: config.zero_optimization.stage == 3,
            "it is for zero_optimization.stage 3",
        )
        for key in _AT_STAGE_3
    ),
    _Condition(
        "gradient_predivide_factor",
        lambda config: not config.prescale_gradients,
        "with prescale_gradients all of the division comes before the sum",
    ),
    _Condition(
        "use_data_before_expert_parallelism",
        lambda config: config.expert_parallel.enabled,
        "expert_parallel.enabled is false",
    ),
    _Condition(
        "seq_parallel_communication_data_type",
        lambda config: config.sequence_parallel_size > 1,
        "sequence_parallel_size is 1",
    ),
    *(
        _Condition(
            f"tensor_parallel.{key}",
            lambda config: max(config.tensor_parallel.autotp_size, config.tensor_parallel.tensor_parallel.tp_size) > 1,
            "no size in tensor_parallel is above 1",
        )
        for key in ("tp_overlap_comm", "sequence_parallel", "partition_config")
    ),
)

_COMPRESSION: Final = "compression_training."
_LAYOUTS: Final = "elasticity.layouts."
"""They count whether or not the section computes the batch."""


def why_without_effect(found: GivenKey, config: Config) -> str | None:
    """Why a key that was given changes nothing; None where it does, or holds its default."""
    if not is_changed(found, config):
        return None
    if found.fate.kind == "no_effect":
        return found.fate.reason
    nest = nest_in(found.field.annotation)
    if found.fate.kind != "read" or (nest and nest.kind == "one"):  # a section is told of key by key
        return None
    unmet = (need for need in _CONDITIONS if f"{found.path}.".startswith(f"{need.path}.") and not need.is_met(config))
    return next((need.reason for need in unmet), None) or _switched_off(found.path, config)


def is_changed(found: GivenKey, config: Config) -> bool:
    """Whether a key holds another value than its default."""
    value = config.at(found.path)
    return value is not None and value != found.field.get_default(call_default_factory=True)


def _switched_off(path: str, config: Config) -> str | None:
    """The switch of a section around a key that is off, outermost first."""
    parts = path.split(".")
    if path.startswith(_COMPRESSION) and parts[2:3] == ["different_groups"]:  # their switch stands beside them
        switch = f"{_COMPRESSION}{parts[1]}.shared_parameters.enabled"
        return None if config.at(switch) else _is_off(switch, config)
    for depth in range(1, len(parts)):
        around = ".".join(parts[:depth])
        section = config.at(around)
        is_off = isinstance(section, Section) and vars(section).get("enabled") is False
        is_used = (around == "fp16" and config.computes_in_fp16) or f"{path}.".startswith(_LAYOUTS)
        if is_off and not is_used and path != f"{around}.enabled":
            return _is_off(f"{around}.enabled", config)
    return None


def _is_off(switch: str, config: Config) -> str:
    """Why a switch is off, in the words of the file."""
    if config.is_auto(switch):
        return f'{switch} is "auto", which is false unless a client says otherwise'
    return f"{switch} is {'false' if config.is_given(switch) else 'absent'}"
