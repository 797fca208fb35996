"""`DeepSpeedEngine`: mizzen's engine, made with the arguments that programs give, and with all that they reach for."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import exp
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from deepspeed import __version__
from deepspeed.faces import engine_optimizers, leaf, parameters
from deepspeed.faces.config import DeepSpeedConfig, arguments_without_hints
from deepspeed.faces.errors import also, elastic
from deepspeed.faces.folder import leave_files
from deepspeed.faces.getters import KEYS
from deepspeed.faces.schedules import KINDS
from mizzen import api
from mizzen.engine.engine import Engine
from mizzen.engine.saving import folder_of
from mizzen.engine.status import GETTERS, NEGATED, UNBUILT
from mizzen.environment import World, environ
from mizzen.errors import CheckpointError, NotBuilt
from mizzen.log import get_logger
from mizzen.parallel.zero.full.sharded_parameter import find_record

SAID: Final = f"DeepSpeed info: version={__version__}, git-hash=mizzen, git-branch=mizzen"
"""The line that programs look for in a log."""
DEFAULTS: Final = {"dropout_stream": "torch"}
"""A script that seeds torch has the dropout that it would have under DDP."""
TENSOR_PARALLEL: Final = "tensor_parallel_request"
"""Under this name a model says what `tp_model_init` has asked for."""
DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32} | {
    name: vars(torch)[name] for name in ("float16", "bfloat16", "float32", "half")
}


class DeepSpeedEngine(Engine):
    """An engine whose `train_batch` returns a loss, and whose counters and checkpoints are as clients expect them."""

    checkpoint_engine = None
    """mizzen has one way to write checkpoints."""
    flops_profiler = None
    sparse_tensor_module_names: frozenset[str] = frozenset()
    has_moe_layers = False
    dist_backend = None

    @also(AssertionError)
    @elastic()
    def __init__(
        self,
        args: Any = None,
        model: nn.Module | None = None,
        optimizer: Any = None,
        model_parameters: Any = None,
        training_data: Any = None,
        lr_scheduler: Any = None,
        mpu: Any = None,
        dist_init_required: bool | None = None,
        collate_fn: Any = None,
        config: Any = None,
        config_class: DeepSpeedConfig | None = None,
        mesh_device: Any = None,
        dont_change_device: bool = False,
        **others: Any,
    ) -> None:
        _tell()
        if dont_change_device or mesh_device is not None:
            raise NotBuilt("an engine that leaves a model where it is, or on a mesh of its own: leave the argument out")
        if config is None and config_class is not None:
            config = config_class.given
        leaf.read_flags(model)
        defaults = DEFAULTS | (vars(model).get(TENSOR_PARALLEL, {}) if model is not None else {})
        given = arguments_without_hints({**others, "args": args, "config": config}, defaults)
        api.initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            make_engine=self._begin,
            defaults=defaults,
            **given,
        )
        self.mpu, self.client_optimizer, self.client_lr_scheduler = mpu, optimizer, lr_scheduler
        engine_optimizers.dress(self, is_configured=optimizer is None)
        if type(self.lr_scheduler) in KINDS:
            self.lr_scheduler.__class__ = KINDS[type(self.lr_scheduler)]
        if self.settings.zero_optimization.stage == 3:
            parameters.install(self.module)
            self.module.register_state_dict_post_hook(empty_shards)  # type: ignore[no-untyped-call]

    def _begin(self, *given: Any) -> "DeepSpeedEngine":
        """This engine, now that all is there that mizzen makes one of."""
        super().__init__(*given)
        return self

    # Where it stands

    @property
    def global_steps(self) -> int:
        """Steps that were due, those that were skipped included."""
        return self.applied_steps + self.skipped_steps

    @global_steps.setter
    def global_steps(self, count: int) -> None:
        self.applied_steps = count - self.skipped_steps

    @property
    def num_stages(self) -> int:
        """How many stages a pipeline has; 1 where there is none."""
        return self.run_context.resolved.layout.pp

    @property
    def stage_id(self) -> int:
        """This rank's stage."""
        return self.get_pipeline_parallel_rank()

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.gradient_accumulation_steps()

    @property
    def pipeline_parallelism(self) -> bool:
        """Whether the model is in stages."""
        return self.num_stages > 1

    is_pipe_parallel = pipeline_parallelism

    def get_global_grad_norm(self) -> float | None:
        """The norm of the whole gradient in the last step; infinite where that was skipped."""
        is_skipped = self.last_step is not None and not self.last_step.applied
        return float("inf") if is_skipped else super().get_global_grad_norm()

    def get_mom(self) -> list[Any]:
        """The momentum, or the betas, of every parameter group; 0 for a group that has none."""
        return [0.0 if momentum is None else momentum for momentum in super().get_mom()]

    def get_pld_theta(self) -> float | None:
        """How likely layers were kept in the last step; 1 before the first, None without progressive layer drop."""
        section = self.settings.progressive_layer_drop
        if not section.enabled:
            return None
        return (1 - section.theta) * exp(-section.gamma * max(0, self.applied_steps - 1)) + section.theta

    @property
    def _config(self) -> DeepSpeedConfig:
        """The configuration, under the attributes that scripts read."""
        return DeepSpeedConfig.of(self.run_context.resolved, self.config)

    @property
    def communication_data_type(self) -> torch.dtype | None:
        """What gradients are reduced in; None where the configuration does not say."""
        return DTYPES.get(str(self.settings.communication_data_type))

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """What autocast computes in."""
        return DTYPES.get(str(self.settings.torch_autocast.dtype))

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.settings.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.settings.zero_optimization.stage >= 3

    def zero_cpu_offload(self) -> bool:
        """Whether states rest on the host of a device: offload is not built yet."""
        return False

    zero_use_cpu_optimizer = zero_partial_offload = zero_nvme_offload_optimizer = super_offload = zero_cpu_offload

    @property
    def save_zero_checkpoint(self) -> bool:
        """Whether this rank writes part of a sharded state."""
        return self.settings.zero_optimization.stage > 0

    @property
    def save_non_zero_checkpoint(self) -> bool:
        """Whether this rank writes what all ranks have."""
        return self.global_rank == 0

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(the dtype the model computes with, the one gradients are summed in)."""
        settings = self.settings
        low = torch.float16 if settings.fp16.enabled else torch.bfloat16 if settings.bf16.enabled else torch.float32
        return low, DTYPES.get(str(settings.data_types.grad_accum_dtype), torch.float32)

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether ranks that save compare their tags."""
        return self._config.checkpoint_tag_validation_enabled

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether tags that differ are an error."""
        return self._config.checkpoint_tag_validation_fail

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        """Whether samples are asked for by number."""
        return "__getitem__" in dir(obj) and "__len__" in dir(obj)

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        """Whether samples come one after the other."""
        return isinstance(obj, torch.utils.data.IterableDataset)

    # What is called by hand

    def _forward_prologue(self, inputs: Any = None, kwargs: Any = None) -> tuple[Any, Any]:
        """What comes before a forward by hand: what the model is given, as it is."""
        return inputs, kwargs

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Nothing: what others do by hand around a bare `loss.backward()`, the engine does in its hooks and `step`."""

    _forward_epilogue = _backward_prologue = _backward_epilogue = _backward_post_hook = _nothing

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on their rank. Stages 0 and 1 only: stage 2 has no room for them."""
        with also(AssertionError), super().no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backwards, one reduction at the end of the context."""
        with also(AssertionError), super().coalesce_grad_reduction():
            yield

    def train_batch(self, data_iter: Iterator[Any] | None = None, loss_fn: Any = None) -> Tensor:  # type: ignore[override]
        """One step; the loss of its report, which is in `last_step`."""
        report = super().train_batch(data_iter, loss_fn)
        return torch.tensor(float("nan") if report.loss is None else report.loss, device=self.device)

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str] | None = None,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        async_save: bool | None = None,
    ) -> bool:
        """Save, then leave beside it the small files that clients look for."""
        saved = super().save_checkpoint(
            save_dir, tag, client_state, save_latest, exclude_frozen_parameters, async_save=async_save
        )
        if saved:
            root = Path(folder_of(self.settings.checkpoint, save_dir))
            name = str(tag) if tag else f"global_step{self.global_steps}"
            leave_files(self, root, name, client_state or {})
        return saved

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str] | None = None,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load; where a client keeps the schedule to itself, learning rates are states of the optimizer."""
        path, client_state = super().load_checkpoint(
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states or self.lr_scheduler is None,
            load_module_only,
            custom_load_fn,
        )
        if path is None and self.settings.checkpoint.load_universal:
            raise CheckpointError(
                f"checkpoint.load_universal is set, and {load_dir} has no checkpoint{f' {tag}' if tag else ''}: give "
                "the tag that was saved; it loads at any layout, and needs no conversion"
            )
        return path, client_state

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """The whole model in one file, under the name that scripts look for."""
        return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model


CHECKED: Final = (
    *("backward", "step", "scale", "train_batch", "zero_grad", "set_gradient_accumulation_boundary", "set_lr"),
    *("set_train_batch_size", "set_train_micro_batch_size", "deepspeed_io", "compile", "allreduce_gradients"),
    *("save_checkpoint", "load_checkpoint", "save_16bit_model", "save_fp16_model", "load_module_state_dict"),
    *("_consolidated_16bit_state_dict", "_zero3_consolidated_16bit_state_dict"),
)
"""Calls whose mistakes are assertions, or wrong values, where these programs come from."""


def _tell() -> None:
    """Say that line on rank 0, also where nobody has chosen a level of messages."""
    own = get_logger()
    if World.detect(environ()).rank == 0 and (not own.level or own.isEnabledFor(logging.INFO)):
        own.handle(own.makeRecord(own.name, logging.INFO, __file__, 0, SAID, (), None))


def _getter(name: str, key: str) -> Callable[[DeepSpeedEngine], Any]:
    def get(self: DeepSpeedEngine) -> Any:
        value = self.settings.at(key)
        return not value if name in NEGATED else value

    get.__name__, get.__qualname__, get.__doc__ = name, f"DeepSpeedEngine.{name}", f"The value of `{key}`."
    return get


def _refusing(name: str, capability: str) -> Callable[..., None]:
    def refuse(self: DeepSpeedEngine, *_: Any, **__: Any) -> None:
        raise NotBuilt(f"engine.{name}() waits for a capability that is not built yet: {capability}")

    refuse.__name__, refuse.__qualname__ = name, f"DeepSpeedEngine.{name}"
    refuse.__doc__ = f"Waits for {capability}."
    return refuse


def _widen() -> None:
    """Methods of the class itself, so that they can be patched, overridden and mocked."""
    own = vars(DeepSpeedEngine)
    for name, key in {**GETTERS, **KEYS}.items():
        if name not in own:
            setattr(DeepSpeedEngine, name, _getter(name, key))
    for name, capability in UNBUILT.items():
        if name not in own:
            setattr(DeepSpeedEngine, name, _refusing(name, capability))
    for name in CHECKED:
        setattr(DeepSpeedEngine, name, also(AssertionError, ValueError)(getattr(DeepSpeedEngine, name)))


_widen()


def empty_shards(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Put empty tensors in the place of shards, as clients know them.

    They look for tensors that share memory, on one rank alone; with a shard, torch would wait for the others there.
    """
    for name, value in state_dict.items():
        if (record := find_record(value)) is not None and record.parameter is not value:
            state_dict[name] = torch.empty(0, dtype=value.dtype, device=value.device)
