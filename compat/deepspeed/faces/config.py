"""Configuration objects: mizzen reads and judges the file; these have the attributes that scripts read."""

import json
from argparse import Namespace
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, Final, get_args

import torch

from deepspeed.faces.errors import also, elastic
from deepspeed.faces.facts import DEEPSPEED_OPTIMIZERS
from deepspeed.faces.getters import KEYS
from mizzen.comm import groups
from mizzen.comm.mesh import layout_from_mpu
from mizzen.config.elasticity import compute_elastic
from mizzen.config.load import ConfigSource, load, load_section, read_source
from mizzen.config.migrate import drop_ignored
from mizzen.config.optimizer import OptimizerConfig, SchedulerConfig
from mizzen.config.resolve import TRIAD, Resolved, resolve, split_degree
from mizzen.config.schema import Config
from mizzen.config.section import Section
from mizzen.config.zero import ZeroConfig
from mizzen.environment import World, environ
from mizzen.errors import ConfigError, UsageError
from mizzen.log import warn_once

DeepSpeedConfigError = ConfigError
SOURCES: Final = ("config", "config_params", "config_dict_or_path")
"""Arguments that are a configuration."""
FLAGS: Final = ("deepspeed_config", "deepscale_config")
"""Flags of scripts that name its file, the second by its old name."""


class _Read(type(ZeroConfig)):  # type: ignore[misc]  # pydantic does not show it
    """Makes a section as a file does: with old keys, without "auto", and with mizzen's errors."""

    def __call__(cls, strict: bool = False, **given: Any) -> Any:
        return cls.of(load({"zero_optimization": given}).zero_optimization)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ZeroConfig)


class DeepSpeedZeroConfig(ZeroConfig, metaclass=_Read):
    """mizzen's section, which also answers to attributes that are keys without their prefix."""

    @classmethod
    def of(cls, section: ZeroConfig) -> "DeepSpeedZeroConfig":
        """A section with this class."""
        found = section.model_copy()
        object.__setattr__(found, "__class__", cls)
        return found  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        key = OLD_ATTRIBUTES.get(name)
        if key is None:
            return super().__getattr__(name)  # type: ignore[misc]
        return getattr(self, key)


OLD_ATTRIBUTES: Final = {
    name: f"stage3_{name}"
    for name in (
        *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
        *("max_live_parameters", "max_reuse_distance", "module_granularity_threshold", "allgather_sequential"),
        *("gather_16bit_weights_on_model_save", "use_all_reduce_for_fetch_params"),
    )
} | {"gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save"}
"""Attribute that scripts read -> the key that it is."""


FLAGGED: Final = frozenset(
    {"adam_w_mode", "adamw_mode", "amsgrad", "bias_correction", "torch_adam", "set_grad_none", "nesterov", "maximize"}
    | {"lr_range_test_staircase", "cycle_momentum", "fp32_optimizer_states"}
)
"""Arguments of optimizers and schedules that are true or false."""


def without_hints(config: ConfigSource) -> ConfigSource:
    """The configuration without the keys at its top that DeepSpeed does not read; the same object if it has none."""
    given = read_source(config)
    ignored = drop_ignored(given, Config)
    if ignored:
        warn_once(f"{', '.join(ignored)}: not looked at; DeepSpeed does not read such keys either, and says nothing")
    flagged = with_flags(given, Config)
    return flagged if ignored or repr(flagged) != repr(given) else config


def counted_once(config: ConfigSource, world: int, defaults: Mapping[str, Any] | None = None) -> ConfigSource:
    """The configuration with a train_batch_size that has each sample once, where all three sizes of a batch are given.

    DeepSpeed and its clients multiply by all ranks, also by those that share a matrix and see the same samples. How
    many these are stands in the configuration, in any of its spellings, or in `defaults`, the keys for one without.
    """
    given = read_source(config)
    sizes: list[Any] = [given.get(key) for key in TRIAD]
    if not all(type(each) is int for each in sizes) or sizes[0] != sizes[1] * sizes[2] * world:
        return config
    ranks = split_degree(load_section({**(defaults or {}), **given}, "tensor_parallel"))
    return config if ranks < 2 or world % ranks else {**given, TRIAD[0]: sizes[0] // ranks}


def with_flags(given: Mapping[str, Any], section: type[Section]) -> dict[str, Any]:
    """The keys of a section; 0 and 1 are false and true where that is what a key takes."""
    found = dict(given)
    for name, value in given.items():
        kinds = _kinds(section.model_fields[name].annotation) if name in section.model_fields else set()
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        if isinstance(value, Mapping) and inner is not None:
            found[name] = with_flags(value, inner)
        elif type(value) is int and value in (0, 1) and bool in kinds and int not in kinds:
            found[name] = bool(value)
    if section in (OptimizerConfig, SchedulerConfig) and isinstance(found.get("params"), Mapping):
        params = found["params"]
        found["params"] = params | {
            name: bool(params[name]) for name in FLAGGED & params.keys() if params[name] in (0, 1)
        }
    return found


def _kinds(annotation: Any) -> set[Any]:
    """The classes that a type is made of."""
    parts = get_args(annotation)
    return {each for part in parts for each in _kinds(part)} if parts else {annotation}


def arguments_without_hints(given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The arguments of a call, with the configuration as mizzen takes it, wherever it was given.

    `defaults` are the keys that the call adds to a configuration without them.
    """
    found = {name: value for name, value in given.items() if name not in SOURCES or value is not None}
    world = groups.get_world_size() if groups.is_initialized() else World.detect(environ()).size

    def taken(config: ConfigSource) -> ConfigSource:
        return counted_once(without_hints(config), world, defaults)

    found |= {name: taken(found[name]) for name in SOURCES if name in found}
    paths = [path for name in FLAGS if (path := getattr(found.get("args"), name, None)) is not None]
    if len(paths) > 1:
        raise ConfigError("", "--deepscale_config is an old name of --deepspeed_config: give one of them, not both")
    if paths:
        found["args"] = Namespace(deepspeed_config=taken(paths[0]))
    return found


def dtype_of(config: ConfigSource | None) -> torch.dtype | None:
    """The dtype in which a model is built for a configuration; None, that of the build, without one."""
    if config is None:
        return None
    settings = load(config)
    return torch.bfloat16 if settings.bf16.enabled else torch.float16 if settings.fp16.enabled else None


class DeepSpeedConfig:
    """A configuration fitted to this job. Any key of the file is an attribute, and so are the names below."""

    @also(AssertionError)
    @elastic()
    def __init__(self, config: ConfigSource, mpu: Any = None, mesh_device: Any = None) -> None:
        given = read_source(config)
        world = groups.get_world_size() if groups.is_initialized() else 1
        if mpu is not None:
            world = layout_from_mpu(mpu, world).dp
        self._fill(resolve(load(counted_once(without_hints(given), world)), world), given, world)

    @classmethod
    def of(cls, resolved: Resolved, given: Mapping[str, Any]) -> "DeepSpeedConfig":
        """That of an engine."""
        found = cls.__new__(cls)
        found._fill(resolved, dict(given), resolved.layout.dp)
        return found

    def _fill(self, resolved: Resolved, given: dict[str, Any], world: int) -> None:
        self._param_dict, self.resolved, self.settings, self.world_size = given, resolved, resolved.config, world
        self.global_rank = groups.get_rank() if groups.is_initialized() else 0

    @property
    def given(self) -> dict[str, Any]:
        """What it was made from."""
        return self._param_dict

    def __getattr__(self, name: str) -> Any:
        """A value by the name that scripts use, or by its key."""
        if name.startswith("__") or name in ("settings", "resolved"):
            raise AttributeError(name)
        if name == "zero_config":
            return DeepSpeedZeroConfig.of(self.settings.zero_optimization)
        key = OTHER_NAMES.get(name) or KEYS.get(name, name)
        if key.split(".")[0] not in type(self.settings).model_fields:
            raise AttributeError(f"the configuration has no {name!r}")
        return self.settings.at(key)

    @property
    def monitor_config(self) -> Config:
        """What `MonitorMaster` takes."""
        return self.settings

    @property
    def zero_enabled(self) -> bool:
        """Whether training state is sharded at all."""
        return self.settings.zero_optimization.stage > 0

    @property
    def optimizer_name(self) -> str | None:
        """The optimizer, in small letters where DeepSpeed has one of that name."""
        name = self.settings.optimizer.type if self.settings.optimizer is not None else None
        return name.lower() if name is not None and name.lower() in DEEPSPEED_OPTIMIZERS else name

    @property
    def initial_dynamic_scale(self) -> float:
        """The loss scale that fp16 begins with."""
        return 2.0**self.settings.fp16.initial_scale_power

    @property
    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether ranks that save compare their tags."""
        return self.settings.checkpoint.tag_validation != "Ignore"

    @property
    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether tags that differ are an error."""
        return self.settings.checkpoint.tag_validation == "Fail"

    def print(self, name: str) -> None:
        """Print every value."""
        self.print_user_config(name)

    def print_user_config(self, name: str = "configuration") -> None:
        """Print what was given."""
        print(f"{name}: {self._param_dict}")  # noqa: T201


OTHER_NAMES: Final[Mapping[str, str]] = {
    "zero_optimization_stage": "zero_optimization.stage",
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "bfloat16_config": "bf16",
    "float16_config": "fp16",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "flops_profiler_config": "flops_profiler",
    "activation_checkpointing_config": "activation_checkpointing",
    "comms_config": "comms_logger",
    "loss_scale": "fp16.loss_scale",
    "elasticity_enabled": "elasticity.enabled",
    "sparse_gradients_enabled": "sparse_gradients",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "checkpoint_config": "checkpoint",
    "checkpoint_parallel_write_pipeline": "checkpoint.parallel_write.pipeline_stage",
    "amp_enabled": "amp.enabled",
    "amp_params": "amp",
    "autotuning_config": "autotuning",
    "compile_config": "compile",
    "compression_config": "compression_training",
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
    "curriculum_params_legacy": "curriculum_learning",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "expert_parallel_config": "expert_parallel",
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    "param_dtype": "data_types.param_dtype",
    "buffer_dtype": "data_types.buffer_dtype",
    "nebula_config": "nebula",
    "pld_enabled": "progressive_layer_drop.enabled",
    "pld_params": "progressive_layer_drop",
    "timers_config": "timers",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "use_data_before_expert_parallel_": "use_data_before_expert_parallelism",
    "weight_quantization_config": "weight_quantization",
}


class DeepSpeedConfigWriter:
    """A configuration that is put together, and written to a file."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = {} if data is None else data

    def add_config(self, key: str, value: Any) -> None:
        """Set one key."""
        self.data[key] = value

    def load_config(self, filename: str) -> None:
        """Take the keys of a file."""
        self.data = read_source(Path(filename))

    def write_config(self, filename: str) -> None:
        """Write them all."""
        Path(filename).write_text(json.dumps(self.data))


def get_config_default(config: type[Section], field_name: str) -> Any:
    """What a field of a section is where a file says nothing."""
    field = config.model_fields.get(field_name)
    if field is None or field.is_required():
        why = "is no field of it" if field is None else "has no default: it has to be given"
        raise UsageError(f"get_config_default({config.__name__}, {field_name!r}): that {why}")
    return field.get_default(call_default_factory=True)


class pp_int(int):  # noqa: N801
    """An integer that prints with commas, or as it is told."""

    custom_print_str: str | None

    def __new__(cls, val: float, custom_print_str: str | None = None) -> "pp_int":
        """The number, and what it prints as."""
        found = super().__new__(cls, val)
        found.custom_print_str = custom_print_str
        return found

    def __repr__(self) -> str:
        return self.custom_print_str or f"{int(self):,}"


class ZeroStageEnum(IntEnum):
    """The stages by name."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(StrEnum):
    """Where tensors may rest."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """What may be moved there between two steps."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ValidationMode:
    """What to do about ranks that save under different tags."""

    WARN = "WARN"
    IGNORE = "IGNORE"
    FAIL = "FAIL"


@elastic()
def compute_elastic_config(
    ds_config: ConfigSource, target_deepspeed_version: str = "", world_size: int = 0, return_microbatch: bool = False
) -> tuple[Any, ...]:
    """(batch, numbers of GPUs that fit it), and the micro-batch for a known number where that is asked for."""
    section = load(without_hints(ds_config)).elasticity
    if not section.enabled:
        raise ConfigError("elasticity.enabled", "elasticity is off: set it to true")
    found = compute_elastic(section, world_size)
    rows = (found.batch, list(found.valid_gpus))
    return (*rows, found.micro) if return_microbatch or world_size else rows


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether a configuration asks for it."""
    section = ds_config.get("elasticity")
    return isinstance(section, Mapping) and bool(section.get("enabled", False))


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Nothing: the launcher gives a job no configuration of its own."""


def is_torch_elastic_compatible() -> bool:
    """Whether torch can start elastic jobs: every one that mizzen runs on can."""
    return True
