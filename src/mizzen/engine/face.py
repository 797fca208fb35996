"""The wide side of the engine: names that users and clients call, each answered from a table or by one line.

`GETTERS` maps a method to the key that answers it; `UNBUILT` lists calls whose capability does not exist yet.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from inspect import ismethod
from os import PathLike
from typing import Any, Final, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp

from mizzen.comm import collectives, groups
from mizzen.comm.mesh import Mesh
from mizzen.config.batch import Batch
from mizzen.config.resolve import Resolved
from mizzen.config.schema import Config
from mizzen.config.section import real, whole
from mizzen.data.loader import Loader
from mizzen.data.repeat import RepeatingLoader
from mizzen.engine.access import load_state_dict, refresh_masters
from mizzen.engine.export import save, whole_state_dict
from mizzen.engine.loading import LoadReport, Wishes, load_checkpoint
from mizzen.engine.optimizer import EngineOptimizer
from mizzen.engine.randomness import RandomStream
from mizzen.engine.run_state import RunState
from mizzen.engine.saving import Given, Saving, save_and_wait, save_checkpoint
from mizzen.engine.stopping import Stopping
from mizzen.engine.window import Window
from mizzen.environment import World
from mizzen.errors import ConfigError, NotBuilt, UsageError
from mizzen.monitor.report import Observer, StepReport
from mizzen.plan.parts import Parts, Store
from mizzen.profiler.step import tree_of
from mizzen.profiler.tree import Branch
from mizzen.rewrite.compile import compile_blocks
from mizzen.rewrite.layer_drop import theta_of
from mizzen.rewrite.standing import restore

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
    "offload_states": "offload",
    "reload_states": "offload",
    "set_data_post_process_func": "data efficiency",
    "set_custom_curriculum_learning_schedule": "curriculum learning",
    "random_ltd_initialize": "random layer-token drop",
    "eval_batch": "pipeline parallelism",
    "set_dataiterator": "pipeline parallelism",
    "set_batch_fn": "pipeline parallelism",
}
"""Call -> the capability it waits for."""


@dataclass(frozen=True, slots=True)
class Surroundings:
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


class Stated(Generic[Value]):
    """An attribute of an engine that stands in its `RunState`, for whoever reads or sets it on the engine."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, engine: "Face | None", owner: type) -> Value:
        found: Value = getattr(engine.run_state if engine is not None else RunState, self._name)
        return found

    def __set__(self, engine: "Face", value: Value) -> None:
        setattr(engine.run_state, self._name, value)


class Face(nn.Module):
    """Everything about an engine that is not the training step."""

    applied_steps = Stated[int]("applied_steps")
    global_samples = Stated[int]("global_samples")
    micro_steps = Stated[int]("micro_steps")
    skipped_steps = Stated[int]("skipped_steps")
    batch = Stated[Batch]("batch")
    window = Stated[Window]("window")
    parts = Stated[Parts]("parts")
    lr_scheduler = Stated[Any]("scheduler")
    training_dataloader = Stated[Any]("loader")

    def __init__(self, run_state: RunState, surroundings: Surroundings) -> None:
        super().__init__()
        self.run_state = run_state
        self.module = run_state.module
        self.surroundings = surroundings
        self.device = surroundings.device
        self.local_rank = surroundings.world.local_rank
        self.global_rank = surroundings.world.rank
        self.world_size = surroundings.world.size
        self.dp_world_size = surroundings.resolved.layout.dp
        self.mp_world_size = surroundings.resolved.layout.tp
        self.sequence_parallel_size = surroundings.resolved.layout.sp
        self.managed = self.settings.managed_gradient_accumulation
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
        # A state dict loaded into the module by anybody, a client included, must not be undone by the next step.
        modules = {id(module): module for module in (self.module, *run_state.modules)}.values()
        self._loading = [module.register_load_state_dict_post_hook(refresh_masters) for module in modules]  # type: ignore[no-untyped-call]
        self.train(self.module.training)

    # What it was built from

    @property
    def settings(self) -> Config:
        """The resolved configuration, frozen."""
        return self.surroundings.resolved.config

    @property
    def config(self) -> Mapping[str, Any]:
        """The user's own dict, as it was given."""
        return self.surroundings.user_config

    @property
    def mesh(self) -> Mesh:
        """The ranks of the run."""
        return self.surroundings.mesh

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
        if not self.window.is_empty:
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
        """The same, under its older name."""
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

    # Data

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader over this rank's share of a data set."""
        if self.surroundings.make_loader is None:
            raise UsageError("this engine has no data parallel group to make a loader for")
        loader = self.surroundings.make_loader(
            dataset,
            batch_size=batch_size or self.batch.micro,
            route=route,
            pin_memory=pin_memory,
            sampler=data_sampler,
            collate_fn=collate_fn,
            workers=num_local_io_workers,
        )
        if isinstance(loader, Loader):
            loader.before_batch = partial(_heed, ref(self))
        return loader

    def set_dataloader(self, loader: Any) -> None:
        """Where `train_batch()` without an iterator takes its data from."""
        self.run_state.set_loader(loader)

    def data_iterator(self) -> Iterator[Any]:
        """The engine's own data, epoch after epoch."""
        if self.training_dataloader is None:
            raise UsageError("train_batch() without an iterator needs training_data: give it to initialize()")
        if self.run_state.iterator is None:
            self.run_state.iterator = iter(RepeatingLoader(self.training_dataloader))
        found: Iterator[Any] = self.run_state.iterator
        return found

    # The module

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's own state dict."""
        found = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    found.pop(prefix + name, None)
        return dict(found)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "model.safetensors", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole model, in the dtype it computes with, to one file of rank 0. Every rank calls this."""
        self._allow_gathering("save_16bit_model")
        skip = self._frozen() if exclude_frozen_parameters else frozenset[str]()
        same = self.mesh.same_piece
        save(save_dir, save_filename, self.module, self.stores, skip=skip, saving=self.saving, same_piece=same)
        return True

    save_fp16_model = save_16bit_model

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole model in the dtype it computes with, on rank 0; None elsewhere. Every rank calls this."""
        self._allow_gathering("_consolidated_16bit_state_dict")
        skip = self._frozen() if exclude_frozen_parameters else frozenset[str]()
        team, same = self.saving.team.on_job_group(), self.mesh.same_piece
        return whole_state_dict(self.module, self.stores, skip=skip, team=team, same_piece=same)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def _allow_gathering(self, call: str) -> None:
        zero = self.settings.zero_optimization
        if zero.stage == 3 and not zero.stage3_gather_16bit_weights_on_model_save:
            raise UsageError(
                f"{call}() at ZeRO stage 3 gathers the whole model on rank 0: set "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save to true to allow it"
            )

    def _frozen(self) -> frozenset[str]:
        return frozenset(name for name, parameter in self.module.named_parameters() if not parameter.requires_grad)

    def empty_partition_cache(self) -> None:
        """Let go of gathered parameters."""
        for store in self.stores:
            store.restore_parameters({})

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Callable[..., None] | None = None
    ) -> None:
        """Load a state dict, or its entry `module`, into the module and the master weights. Every rank calls this."""
        state = checkpoint.get("module", checkpoint) if isinstance(checkpoint, Mapping) else checkpoint
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=self.module)
            refresh_masters(self.module)
            return
        load_state_dict(self.module, self.owners, state, strict=strict)

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
        """Save all that training needs to go on, under a tag (`global_stepN` when absent). Every rank calls this.

        True once it is committed; with `async_save` (or `checkpoint.async_save`) once the state is copied, and the next
        step, the next save or `finish_saving()` raises what went wrong after that.
        """
        return save_checkpoint(
            self.run_state,
            self.saving,
            save_dir,
            ("" if tag is None else str(tag)) or f"global_step{self.global_steps}",
            {} if client_state is None else client_state,
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
            beside=self.settings.checkpoint.async_save if async_save is None else async_save,
        )

    def register_client_state(self, callback: Callable[[], Mapping[str, Any]]) -> None:
        """What to put into the checkpoint of a run that is asked to stop; every rank's callback is called then."""
        self.stopping.client_state = callback

    def heed(self) -> None:
        """Save and leave, if the run was asked to stop and all ranks know it. Called between steps."""
        self.stopping.heed(self.run_state, is_training=self.training, save=self._save_before_stop)

    def _save_before_stop(self, client_state: Mapping[str, Any]) -> bool:
        return save_and_wait(self.saving, partial(self.save_checkpoint, client_state=client_state, async_save=False))

    def moved(self) -> None:
        """State was set from outside: nothing of the step under way counts any more."""
        raise NotImplementedError

    def finish_saving(self) -> None:
        """Wait until a save beside training is committed, and raise what went wrong with it."""
        self.saving.background.wait()

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
        """Load a checkpoint that was saved at any layout; (its folder, client state), or (None, None) without one.

        Every rank calls this. Without a tag the latest is taken. `load_report` then lists names that did not fit.
        """
        wishes = Wishes(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            module_only=load_module_only,
            custom=custom_load_fn,
        )
        return self._load(load_dir, None if tag is None else str(tag), wishes)

    def resume_if_possible(
        self, load_dir: str | PathLike[str] | None = None
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from the latest checkpoint of a folder; (None, None), without a warning, when there is none."""
        return self._load(load_dir, None, Wishes(must_be_there=False))

    def _load(self, folder: Given, tag: str | None, wishes: Wishes) -> tuple[str | None, dict[str, Any] | None]:
        loaded = load_checkpoint(self.run_state, self.saving, folder, tag, wishes)
        if loaded is None:
            return None, None
        self.load_report = loaded.report
        self.moved()
        return loaded.folder, loaded.client

    @property
    def flops_profile(self) -> Branch | None:
        """What `flops_profiler` has counted, module by module; None before its step."""
        return tree_of(self.observers)

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds per phase of the latest step that the device has finished, with `wall_clock_breakdown`."""
        phases = self.last_step.phases if self.last_step is not None else {}
        return {name: 1e3 * seconds for name, seconds in phases.items()}

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile each repeated block of the model, in place; `compile_kwargs` go to torch.compile."""
        if schedule is not None or compiled_autograd_enabled:
            raise NotBuilt("engine.compile() with a schedule of passes, or of backward as a whole, is not built yet")
        if not isinstance(compile_kwargs or {}, Mapping):
            raise UsageError(f"compile_kwargs={compile_kwargs!r}: give a dict of arguments for torch.compile")
        for module in self.run_state.modules:
            compile_blocks(module, {"backend": backend, **(compile_kwargs or {})})
        self.is_compiled = True

    def destroy(self) -> None:
        """Give everything back: hooks, buffers, loaders, observers. The module stays usable, with its values."""
        for hook in self._loading:
            hook.remove()
        for store in self.stores:
            store.release()
        for module in self.run_state.modules:
            restore(module)
        for observer in self.observers:
            observer.close()
        self.parts, self.observers, self.owners, self.optimizer, self.lr_scheduler = (), (), [], None, None
        self.run_state.optimizer = None
        if isinstance(self.training_dataloader, Loader):
            self.training_dataloader.close()
        self.set_dataloader(None)

    def __deepcopy__(self, memo: Any) -> Any:
        """What `copy.deepcopy` calls."""
        raise UsageError(
            "an engine cannot be copied or pickled, with its groups of ranks and its share of the state: save it with "
            "engine.save_checkpoint() or engine.save_16bit_model(); below stage 3 torch.save and copy.deepcopy take "
            "engine.module"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What `torch.save`, `pickle` and `copy.copy` call."""
        return self.__deepcopy__(None)

    def __getattr__(self, name: str) -> Any:
        if name in GETTERS:
            value = self.settings.at(GETTERS[name])
            return lambda: not value if name in NEGATED else value
        if name in UNBUILT:
            return partial(_refuse, name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in dir(type(self)) or name == "module":
                raise  # a property of ours failed: its own error says more than the module's
        found = getattr(self.module, name)
        is_method = ismethod(found) and found.__self__ is self.module
        return update_wrapper(partial(self._call, found), found) if is_method else found

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A method of the model other than forward, which may use its parameters wherever they are."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.method_scope)
            return method(*args, **kwargs)


def _heed(engine: "ref[Face]") -> None:
    """What a loader calls before a batch; it does not keep the engine alive."""
    if (found := engine()) is not None:
        found.heed()


def _whole(path: str, value: Any) -> int:
    try:
        return whole(value)
    except ValueError as error:
        raise ConfigError(path, str(error)) from None


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise NotBuilt(f"engine.{name}() waits for a capability that is not built yet: {UNBUILT[name]}")
