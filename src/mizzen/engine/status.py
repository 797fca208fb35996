"""What an engine was built from and where it stands: sizes, rates, ranks and counters, each answered by one line.

`GETTERS` maps a method to the key that answers it; `UNBUILT` lists calls whose capability does not exist yet.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp

from mizzen.comm import collectives, groups
from mizzen.comm.mesh import Mesh
from mizzen.config.resolve import Batch, Resolved
from mizzen.config.schema import Config
from mizzen.config.section import real, whole
from mizzen.engine.loading import LoadReport
from mizzen.engine.optimizer import EngineOptimizer
from mizzen.engine.randomness import RandomStream
from mizzen.engine.run_state import RunState, StepInProgress
from mizzen.engine.runner import Runner
from mizzen.engine.saving import Saving
from mizzen.engine.stopping import Stopping
from mizzen.environment import World
from mizzen.errors import ConfigError, UsageError
from mizzen.monitor.report import Observer, StepReport
from mizzen.plan.parts import Parts, Store
from mizzen.rewrite.layer_drop import theta_of

Value = TypeVar("Value")
GETTERS: Final[Mapping[str, str]] = {
    "steps_per_print": "steps_per_print",
    "gradient_clipping": "gradient_clipping",
    "zero_optimization_stage": "zero_optimization.stage",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "zero_allgather_partitions": "zero_optimization.allgather_partitions",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_overlap_comm": "zero_optimization.overlap_comm",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_ignore_unused_parameters": "zero_optimization.ignore_unused_parameters",
    "zero_offload_optimizer": "zero_optimization.offload_optimizer",
    "zero_offload_param": "zero_optimization.offload_param",
    "zero_sub_group_size": "zero_optimization.sub_group_size",
    "zero_prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "zero_max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "zero_gather_16bit_weights_on_model_save": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
    "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "mics_shard_size": "zero_optimization.mics_shard_size",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "fp16_enabled": "fp16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "bfloat16_enabled": "bf16.enabled",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "amp_enabled": "amp.enabled",
    "communication_data_type": "communication_data_type",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "postscale_gradients": "prescale_gradients",
    "sparse_gradients_enabled": "sparse_gradients",
    "gradient_allreduce_op": "gradient_allreduce_op",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "memory_breakdown": "memory_breakdown",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "dump_state": "dump_state",
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "pld_enabled": "progressive_layer_drop.enabled",
    "pld_theta": "progressive_layer_drop.theta",
    "pld_gamma": "progressive_layer_drop.gamma",
    "autotuning_enabled": "autotuning.enabled",
    "elasticity_enabled": "elasticity.enabled",
    "optimizer_name": "optimizer.type",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "checkpoint_tag_validation_mode": "checkpoint.tag_validation",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "dataloader_drop_last": "dataloader_drop_last",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
}
"""Method without arguments -> the key whose value it returns."""

NEGATED: Final = frozenset({"postscale_gradients"})

UNBUILT: Final[Mapping[str, str]] = {
    "get_compile_time": "passes over the graph",
    "register_compile_pass": "passes over the graph",
    "set_data_post_process_func": "data efficiency",
    "set_custom_curriculum_learning_schedule": "curriculum learning",
    "random_ltd_initialize": "random layer-token drop",
}
"""Call -> the capability it waits for."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """What an engine is told about the run it is part of."""

    resolved: Resolved
    user_config: Mapping[str, Any]
    mesh: Mesh
    world: World
    device: torch.device
    stream: RandomStream
    make_loader: Callable[..., Any] | None = None
    seed: int = 0
    """What all random numbers of the run derive from."""
    groups: tuple[tuple[str, ...], ...] = ()
    """The names of the trained parameters, by optimizer group."""


class RunStateAttribute(Generic[Value]):
    """An attribute of an engine that stands in its `RunState`, for whoever reads or sets it on the engine."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, engine: "EngineStatus | None", owner: type) -> Value:
        found: Value = getattr(engine.run_state if engine is not None else RunState, self._name)
        return found

    def __set__(self, engine: "EngineStatus", value: Value) -> None:
        setattr(engine.run_state, self._name, value)


class EngineStatus(nn.Module):
    """What users and clients ask an engine, and the sizes and rates that they set."""

    applied_steps = RunStateAttribute[int]("applied_steps")
    global_samples = RunStateAttribute[int]("global_samples")
    micro_steps = RunStateAttribute[int]("micro_steps")
    skipped_steps = RunStateAttribute[int]("skipped_steps")
    batch = RunStateAttribute[Batch]("batch")
    step_in_progress = RunStateAttribute[StepInProgress]("step_in_progress")
    parts = RunStateAttribute[Parts]("parts")
    lr_scheduler = RunStateAttribute[Any]("scheduler")
    training_dataloader = RunStateAttribute[Any]("loader")

    def __init__(self, run_state: RunState, context: RunContext) -> None:
        super().__init__()
        self.run_state = run_state
        self.module = run_state.module
        self.run_context = context
        self.device = context.device
        self.local_rank = context.world.local_rank
        self.global_rank = context.world.rank
        self.world_size = context.world.size
        self.dp_world_size = context.resolved.layout.dp
        self.mp_world_size = context.resolved.layout.tp
        self.sequence_parallel_size = context.resolved.layout.sp
        self.managed = self.settings.managed_gradient_accumulation
        self.runner: Runner
        self.saving: Saving
        self.stopping: Stopping
        self.observers: tuple[Observer, ...] = ()
        self.last_step: StepReport | None = None
        """What the last optimizer step reported."""
        self.step_was_due = False
        """Whether the last call of `step` was at a boundary."""
        self.load_report = LoadReport()
        """What did not fit in the last `load_checkpoint`."""
        self.owners: list[Any] = []
        """What `mizzen.zero` finds behind a parameter, for as long as this engine lives."""
        self.is_compiled = self.settings.compile.enabled
        self.optimizer: EngineOptimizer | None = None
        self.train(self.module.training)

    # What it was built from

    @property
    def settings(self) -> Config:
        """The resolved configuration, frozen."""
        return self.run_context.resolved.config

    @property
    def config(self) -> Mapping[str, Any]:
        """The user's own dict, as it was given."""
        return self.run_context.user_config

    @property
    def mesh(self) -> Mesh:
        """The ranks of the run."""
        return self.run_context.mesh

    @property
    def stores(self) -> list[Store]:
        """What holds the trained parameters of this rank."""
        return self.run_state.stores

    @property
    def global_steps(self) -> int:
        """How far training is: the optimizer steps that were taken. Tags of checkpoints are named after it."""
        return self.applied_steps

    @property
    def basic_optimizer(self) -> Any:
        """The optimizer that does the arithmetic."""
        return self.run_state.optimizer

    def train_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward pass on one rank."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Forward passes per optimizer step."""
        return self.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch size, micro batch size, accumulation steps)."""
        return self.batch.train, self.batch.micro, self.batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per step by changing the accumulation alone, between two steps."""
        self._between_steps("set_train_batch_size")
        step, train_batch_size = self.batch.micro * self.batch.dp, _whole("train_batch_size", train_batch_size)
        if train_batch_size < 1 or train_batch_size % step:
            raise ConfigError("train_batch_size", f"{train_batch_size} is not a multiple of micro x dp = {step}")
        self.batch = replace(self.batch, train=train_batch_size, accumulation=train_batch_size // step)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per forward pass, and with them the samples per step, between two steps."""
        self._between_steps("set_train_micro_batch_size")
        micro_batch_size = _whole("train_micro_batch_size_per_gpu", micro_batch_size)
        if micro_batch_size < 1:
            raise ConfigError("train_micro_batch_size_per_gpu", f"{micro_batch_size} is not at least 1")
        train = micro_batch_size * self.batch.accumulation * self.batch.dp
        self.batch = replace(self.batch, train=train, micro=micro_batch_size)

    def _between_steps(self, call: str) -> None:
        """Refuse a new size for a step whose first micro-batches were divided, and are counted, by the old one."""
        if not self.step_in_progress.is_empty:
            raise UsageError(
                f"{call}() in the middle of an accumulation: the micro-batches so far count for the old size. Call it "
                "after a step() that updates"
            )

    # Where it stands

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [float(group["lr"]) for group in self._groups()]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        try:
            rate = real(lr)
        except ValueError as error:
            raise UsageError(f"set_lr(): {error}") from None
        for group in self._groups():
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def get_pld_theta(self) -> float | None:
        """How likely the model shall keep a layer in this step; None without progressive layer drop."""
        return theta_of(self.observers)

    def get_mom(self) -> list[Any]:
        """The momentum, or the betas, of every parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def get_type(self) -> list[Any]:
        """The type tag of every parameter group, where it has one."""
        return [group.get("type") for group in self._groups()]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the whole gradient in the last optimizer step, before clipping; None before the first."""
        return self.last_step.grad_norm if self.last_step is not None else None

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` changed the parameters."""
        return self.step_was_due and self.last_step is not None and self.last_step.applied

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    def loss_scale(self) -> float:
        """The factor that losses are multiplied with before backward."""
        return self.optimizer.loss_scale if self.optimizer is not None else 1.0

    def dynamic_loss_scale(self) -> bool:
        """Whether that factor moves by itself."""
        return self.optimizer is not None and self.optimizer.dynamic_loss_scale

    def initial_dynamic_scale(self) -> float:
        """What it starts from where it does."""
        return 2.0**self.settings.fp16.initial_scale_power

    @property
    def is_accumulating(self) -> bool:
        """Whether micro-batches wait for a step. Where boundaries are set from outside, counting would not tell."""
        return self.run_state.is_accumulating

    @property
    def gradient_average(self) -> bool:
        """Whether gradients are averaged over the data-parallel ranks instead of summed, as the configuration says."""
        return self.settings.gradient_allreduce_op == "mean"

    @gradient_average.setter
    def gradient_average(self, value: bool) -> None:
        if value != self.gradient_average:
            wanted = "mean" if value else "sum"
            raise UsageError(
                f"engine.gradient_average = {value!r}: how gradients are reduced is decided by initialize(); set "
                f'gradient_allreduce_op to "{wanted}" in the configuration'
            )

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.settings.zero_optimization.stage > 0

    def get_data_parallel_rank(self) -> int:
        """This rank's place among the data-parallel ranks."""
        return self.mesh.data_rank

    def get_tensor_parallel_rank(self) -> int:
        """This rank's place among the tensor-parallel ranks."""
        return self.mesh.tensor_rank

    def get_model_parallel_rank(self) -> int:
        """The tensor-parallel rank, under its older name."""
        return self.get_tensor_parallel_rank()

    def get_sequence_parallel_group(self) -> ProcessGroup | None:
        """The ranks that share one sequence."""
        return self.mesh.sequence_group

    def fewest_over_ranks(self, count: int) -> int:
        """The least of a count over all ranks."""
        if self.world_size == 1:
            return count
        least = torch.tensor(count, device=groups.exchange_device())  # on the host: nobody waits for the device
        collectives.all_reduce(least, op=ReduceOp.MIN)
        return int(least)

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Reduce what is still local now, instead of at the next step."""
        for store in self.stores:
            store.reduce()


def _whole(path: str, value: Any) -> int:
    try:
        return whole(value)
    except ValueError as error:
        raise ConfigError(path, str(error)) from None
