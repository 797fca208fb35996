"""What clients reach for in an engine and its optimizer, beyond what mizzen's have."""

from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deepspeed.faces import parameters, scaler
from deepspeed.faces.folder import leave_files
from deepspeed.faces.getters import KEYS
from deepspeed.faces.schedules import KINDS
from mizzen.engine.engine import Engine
from mizzen.engine.optimizer import EngineOptimizer
from mizzen.engine.saving import folder_of
from mizzen.errors import NotBuilt


class DropInEngine(Engine):
    """An engine whose `train_batch` returns a loss, and whose checkpoints look as clients expect."""

    checkpoint_engine = None
    """mizzen has one way to write checkpoints."""
    flops_profiler = None
    sparse_tensor_module_names: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        """A value of the configuration by the method that returns it, or what mizzen's engine finds."""
        if name in KEYS:
            value = self.settings.at(KEYS[name])
            return lambda: value
        return super().__getattr__(name)

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
        names = {"fp16": torch.float16, "bf16": torch.bfloat16}
        return low, names.get(str(settings.data_types.grad_accum_dtype), torch.float32)

    def is_map_style_dataset(self, obj: Any) -> bool:
        """Whether samples are asked for by number."""
        return "__getitem__" in dir(obj) and "__len__" in dir(obj)

    def is_iterable_style_dataset(self, obj: Any) -> bool:
        """Whether samples come one after the other."""
        return isinstance(obj, torch.utils.data.IterableDataset)

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
        return super().load_checkpoint(
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states or self.lr_scheduler is None,
            load_module_only,
            custom_load_fn,
        )

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """The whole model in one file, under the name that scripts look for."""
        return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model


class DropInOptimizer(EngineOptimizer):
    """The same optimizer, with the names of its kin."""

    engine: Engine
    """The one that it belongs to, which it does not keep alive."""

    def backward(self, loss: Tensor, create_graph: bool = False, retain_graph: bool = False) -> None:
        """Gradients of a loss as it is: who calls this of an optimizer divides by the accumulation himself."""
        if create_graph:
            raise NotBuilt("backward(create_graph=True): gradients of gradients are not built yet")
        self.engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def set_lr(self, lr: float) -> None:
        """One learning rate for all groups."""
        self.engine.set_lr(lr)

    def get_lr(self) -> float:
        """That of the first group."""
        return self.engine.get_lr()[0]

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The tensors of each group."""
        return [list(group["params"]) for group in self.param_groups]

    @property
    def initialized_optimizer(self) -> "DropInOptimizer":
        """Itself."""
        return self


class PartitioningOptimizer(DropInOptimizer):
    """Of ZeRO stages 1 and 2."""


class FullPartitioningOptimizer(DropInOptimizer):
    """Of ZeRO stage 3."""

    @property
    def parameter_offload(self) -> "ParameterOffload":
        """What gathers parameters there; here hooks of mizzen's own do, and stay."""
        return ParameterOffload()


class _NoModule:
    """Stands for a model none of whose parameters needs anything done."""

    def named_parameters(self, recurse: bool = True) -> Iterator[Any]:
        """None."""
        return iter(())

    def ds_external_parameters(self) -> Iterator[Any]:
        """None."""
        return iter(())


class _Coordinator:
    """Stands for a recorded order of gathers: there is none."""

    def is_invalid_trace(self) -> bool:
        """Whether the record is void."""
        return True

    def _invalidate_trace(self) -> None:
        """Nothing."""


class ParameterOffload:
    """Lists and calls that clients go through around generation. Gathered parameters stay whole by themselves."""

    def __init__(self) -> None:
        self.module = _NoModule()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = _Coordinator()

    def _register_deepspeed_module(self, module: Any) -> None:
        """Nothing."""


class DeepSpeedOptimizer(ABC):  # noqa: B024
    """For `isinstance`: the optimizer of any engine."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """For `isinstance`: the optimizer of an engine that shards."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """For `isinstance`: at ZeRO stages 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # noqa: N801
    """For `isinstance`: at ZeRO stage 3."""


DeepSpeedOptimizer.register(EngineOptimizer)
DeepSpeedZeroOptimizer.register(PartitioningOptimizer)
DeepSpeedZeroOptimizer_Stage3.register(FullPartitioningOptimizer)

OPTIMIZERS: tuple[type[DropInOptimizer], ...] = (
    DropInOptimizer,
    PartitioningOptimizer,
    PartitioningOptimizer,
    FullPartitioningOptimizer,
)
"""By stage."""


DeepSpeedOptimizerCallable = DeepSpeedSchedulerCallable = Callable[[Any], Any]
"""What makes an optimizer from parameter groups, or a schedule from an optimizer."""


def dress(engine: Engine) -> None:
    """Give an engine, as mizzen has built it, the wider classes of this file."""
    stage = engine.settings.zero_optimization.stage
    engine.__class__ = DropInEngine
    if engine.optimizer is not None:
        engine.optimizer.__class__ = OPTIMIZERS[stage]
        engine.optimizer.engine = proxy(engine)  # type: ignore[attr-defined]
        scaler.dress(engine.optimizer.loss_scaler)
    if type(engine.lr_scheduler) in KINDS:
        engine.lr_scheduler.__class__ = KINDS[type(engine.lr_scheduler)]
    if stage == 3:
        parameters.install(engine.module)
        engine.module.register_state_dict_post_hook(empty_shards)  # type: ignore[no-untyped-call]


def empty_shards(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Put empty tensors in the place of shards, as clients know them.

    They look for tensors that share memory, on one rank alone; with a shard, torch would wait for the others there.
    """
    for name, value in state_dict.items():
        if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
            state_dict[name] = torch.empty(0, dtype=value.dtype, device=value.device)
