"""`zero_optimization`: how training state is sharded over the data-parallel ranks, and where it rests."""

import sys
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from mizzen.config.section import (
    BucketSize,
    Count,
    CountOrAuto,
    Flag,
    FromMinusOne,
    Name,
    NumberOrAuto,
    Ratio,
    Section,
    Size,
    SizeOrAuto,
    Text,
    Whole,
    also_spelled,
    deprecated,
    flag,
    integral,
    no_effect,
    refused,
    section,
)
from mizzen.wording import byte_size


def _to_offload(value: Any) -> Any:
    """`cpu_offload: true` in today's words."""
    return {"device": "cpu"} if flag(value) else None


def _true_if_null(value: Any) -> Any:
    """The documented default of `overlap_comm` is null; here that means on."""
    return True if value is None else value


class _OffloadConfig(Section):
    """A resting place for tensors outside the device."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where the tensors rest; none is the same as leaving the section out."""
    nvme_path: Text | tuple[Text, ...] | None = None
    """Folder on the NVMe drive, or one on each of several, over which files are striped; needed for `device: nvme`."""
    pin_memory: Flag = True
    """Keep host buffers page-locked: faster copies, at the price of memory that the system cannot swap."""


class OffloadParamConfig(_OffloadConfig):
    """A resting place for the parameters, for stage 3."""

    buffer_count: Count = 5
    """Buffers of host memory through which parameters pass on their way from NVMe."""
    buffer_size: BucketSize = no_effect(100_000_000, "a buffer holds what is gathered together of the largest unit")
    """Elements in each of these buffers."""
    max_in_cpu: Size = 1_000_000_000
    """Parameter elements of a rank that stay in host memory when the rest is on NVMe."""


class OffloadOptimizerConfig(_OffloadConfig):
    """A resting place for the optimizer states, and the step that runs there."""

    buffer_count: Count = no_effect(4, "as many buckets are in host memory as are read, stepped and written at once")
    """Buffers through which states pass on their way from NVMe."""
    pipeline_read: Flag = no_effect(False, "the next bucket is always read while one is stepped")
    """Read the next states from NVMe while others are stepped."""
    pipeline_write: Flag = no_effect(False, "a bucket is always written while the next is stepped")
    """Write states to NVMe while others are stepped."""
    fast_init: Flag = no_effect(False, "states are made bucket by bucket at the first step")
    """Make the states on NVMe without first building them in memory."""
    ratio: Ratio = 1.0
    """Share of the states that rests outside; the others stay on the device and step there."""
    super_offload: Flag = False
    """Other name of `offload.step_in_backward`."""
    cpuadam_cores_perc: Ratio | None = None
    """Share of a rank's cores that the step on the host has as threads, where `offload.threads` does not say how many;
    absent is all of them, and 0.8 with a step during the backward pass."""


class OffloadConfig(Section):
    """Byte budgets of each rank: masters and optimizer states that do not fit a place rest in the next one."""

    device_bytes: SizeOrAuto | None = None
    """Bytes that may rest on the device; absent is without a limit, 0 keeps nothing there between steps. "auto" is half
    of what is free beside the rest of the training state, and 0 with `deterministic`."""
    host_bytes: SizeOrAuto | None = None
    """Bytes that may rest in host memory, parameters included that `offload_param` brings there, with the buffers of
    those in files; absent is without a limit. "auto" is what is free, less a tenth of the memory and the gradients that
    come there, shared among the ranks of the machine."""
    nvme_bytes: SizeOrAuto = 0
    """Bytes that may rest on the NVMe drives of `offload_optimizer.nvme_path`; absent is none. "auto" is nine tenths of
    what is free there, shared among the ranks of the machine."""
    streamed_ratio: NumberOrAuto = "auto"
    """Share of what rests in host memory that is stepped on the device, through which it passes; the host steps the
    others at the same time. "auto" is measured in the first steps, and none with `deterministic` or
    `step_in_backward`."""
    threads: CountOrAuto = "auto"
    """Threads of the step on the host; "auto" shares the cores of the machine among its ranks."""
    step_in_backward: Flag = False
    """Step on the host during the backward pass, into copies that take the place of masters and states when all ranks
    have agreed on the step; lots are stepped again where gradients turn out to be clipped. It doubles what masters and
    states take of host memory, and adds the gradient of the largest lot."""

    @property
    def budgets(self) -> dict[str, int | str | None]:
        """The budgets by their keys: bytes, "auto" where they are to be found, None for those without a limit."""
        return {"device_bytes": self.device_bytes, "host_bytes": self.host_bytes, "nvme_bytes": self.nvme_bytes}

    @property
    def has_budgets(self) -> bool:
        """Whether any budget is said; otherwise `offload_optimizer` says what rests where."""
        return (self.device_bytes, self.host_bytes, self.nvme_bytes) != (None, None, 0)

    def budget_words(self) -> str:
        """The budgets, for people."""
        return ", ".join(f"{key.removesuffix('_bytes')} {_words(size)}" for key, size in self.budgets.items())


def _words(size: int | str | None) -> str:
    if size is None:
        return "without a limit"
    return byte_size(size) if isinstance(size, int) else size


class ZenFlowConfig(Section):
    """Step the few important columns of matrices on the device, and everything else on the host, every few steps."""

    topk_ratio: Ratio = 0.1
    """Share of the columns of each matrix that is important; vectors always are."""
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    """What `select_interval` counts; "auto" is each epoch."""
    select_interval: CountOrAuto = "auto"
    """Steps or epochs after which the important columns are chosen anew, at the next update of the others; "auto" is
    one epoch."""
    update_interval: CountOrAuto = "auto"
    """Steps whose gradients of all other columns add up before a step on the host takes their mean; "auto" goes by
    their size, with `auto_ratio`, and ends after 32."""
    overlap_step: Flag = False
    """Let that step on the host go on while the device trains: the model has its result one step later."""
    offload: Flag = False
    """Keep also masters and states of the important columns in host memory between steps: less memory of the device,
    and more copies."""
    auto_ratio: Ratio = 0.99
    """With `update_interval` "auto": share of the matrices in which gradients that wait have to be as large as
    important ones, in the mean and times the steps that they have waited."""
    full_warm_up_rounds: Whole = 0
    """Steps at the start in which everything is updated in every step, all of it on the host."""
    pt_reserved_cores_perc: Ratio = 0.5
    """With `overlap_step`: share of a rank's cores that the step on the host leaves alone, unless `offload.threads` is
    given."""
    steps_per_epoch: Count | None = None
    """Optimizer steps in one epoch; absent is what the data loader of the engine says, if it has one."""

    def words(self) -> str:
        """What is stepped when, for people."""
        interval = self.update_interval
        others = "when they are due" if interval == "auto" else f"every {interval} steps" if interval > 1 else "too"
        return f"{self.topk_ratio:.3g} of the columns in each step, the others {others}"


class LocoConfig(Section):
    """Error feedback for quantized gradients."""

    err_beta: Ratio = 0.8
    """Share of the old error in the running one."""
    reset_T: Count = 1024  # the name that users have in their files
    """Steps after which the error starts again from zero."""


class LeafModuleConfig(Section):
    """Modules whose parameters are gathered as one unit."""

    classes: tuple[Name, ...] = ()
    """Classes of such modules, by name or full path."""
    names: tuple[Name, ...] = ()
    """Such modules by their full name in the model."""
    name_suffixes: tuple[Name, ...] = ()
    """Such modules by the end of their name."""


def _absent_if_none(value: Any) -> Any:
    return None if value is not None and value.device == "none" else value


class ZeroConfig(Section):
    """How training state is sharded over the data-parallel ranks."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(integral)] = 0
    """0 replicates all, 1 shards optimizer states, 2 also gradients, 3 also parameters."""
    reduce_bucket_size: BucketSize = 500_000_000
    """Largest number of elements reduced at once, of what is not sharded: a unit of stage 3 is reduced as a whole.

    Small models get smaller buckets, so that reduction overlaps.
    """
    allgather_bucket_size: BucketSize = 500_000_000
    """Largest number of elements gathered at once; an upper bound, as for reduction, and of the same parameters."""
    overlap_comm: Annotated[Flag, BeforeValidator(_true_if_null)] = True
    """Communicate while the backward pass still computes."""
    offload_optimizer: Annotated[OffloadOptimizerConfig | None, AfterValidator(_absent_if_none)] = None
    """Resting place of the optimizer states; absent keeps them on the device."""
    offload_param: Annotated[OffloadParamConfig | None, AfterValidator(_absent_if_none)] = None
    """Resting place of the parameters, for stage 3; absent keeps them on the device."""
    zenflow: ZenFlowConfig | None = None
    """Step important columns at once and the others on the host, later; absent steps everything together."""

    stage3_prefetch_bucket_size: Size = also_spelled(50_000_000, "prefetch_bucket_size")
    """Elements gathered ahead of their use in forward; 0 gathers each when needed. Backward is one block ahead."""
    stage3_param_persistence_threshold: Size = also_spelled(100_000, "param_persistence_threshold")
    """Parameters with fewer elements stay whole on every rank."""
    stage3_model_persistence_threshold: Size = also_spelled(sys.maxsize, "model_persistence_threshold")
    """Largest number of elements that stay whole on a rank by the threshold above."""
    stage3_gather_16bit_weights_on_model_save: Flag = also_spelled(False, "gather_16bit_weights_on_model_save")
    """Let `save_16bit_model` gather the whole model, which needs its size in host memory on rank 0."""
    leaf_module: LeafModuleConfig = section(LeafModuleConfig)
    """Modules gathered as one unit, whatever runs inside them."""
    enable_sanity_checks: Flag = False
    """Compare parameters over the ranks after each `GatheredParameters`, to find edits made on one rank only."""

    zero_hpz_partition_size: Count = 1
    """Ranks of a node that keep a second copy of the shards for backward, and sum quantized gradients first."""
    zero_quantized_weights: Flag = False
    """Gather parameters as 8-bit blocks."""
    zero_quantized_nontrainable_weights: Flag = False
    """Keep matrices that are not trained as 8-bit blocks, and gather them as such."""
    zero_quantized_gradients: Flag = False
    """Reduce gradients as 4-bit blocks."""
    zeropp_loco_param: LocoConfig | None = None
    """Error feedback for quantized gradients; absent means none."""
    mics_shard_size: FromMinusOne = -1
    """Ranks among which one copy of the state is sharded; -1 shards over all data-parallel ranks."""

    contiguous_gradients: Flag = no_effect(True, "gradients always lie in one contiguous buffer")
    """Copy gradients into one buffer as they appear."""
    reduce_scatter: Flag = no_effect(True, "each stage uses the collective that moves the fewest bytes")
    """Reduce-scatter gradients instead of all-reducing them."""
    use_multi_rank_bucket_allreduce: Flag = no_effect(True, "a bucket is always reduced by one collective")
    """Reduce the buckets of several owners by one collective."""
    allgather_partitions: Flag = no_effect(True, "new parameters are always gathered by all-gather")
    """Choose all-gather over broadcasts."""
    round_robin_gradients: Flag = no_effect(False, "every rank owns an equal share of each bucket")
    """Deal gradients out to the ranks in turn."""
    ignore_unused_parameters: Flag = no_effect(True, "a parameter without a gradient contributes zeros")
    """Do not object to parameters that get no gradient."""
    load_from_fp32_weights: Flag = no_effect(True, "a checkpoint holds the masters, and they are always restored")
    """Restore masters from the fp32 weights of a checkpoint."""
    elastic_checkpoint: Flag = no_effect(False, "every checkpoint loads at any number of ranks")
    """Save checkpoints that another number of ranks can load."""
    pipeline_loading_checkpoint: Flag = no_effect(False, "each rank reads only what it owns")
    """Load one rank of a node after the other."""
    sub_group_size: Size = no_effect(1_000_000_000, "the optimizer steps through buckets, not through sub-groups")
    """Elements that the optimizer steps at once at stage 3."""
    stage3_max_live_parameters: Size = also_spelled(1_000_000_000, "max_live_parameters")
    """A stage of a pipeline with at most so many elements stays gathered while a batch goes through it; in all other
    cases a block is freed after each use."""
    stage3_max_reuse_distance: Size = no_effect(1_000_000_000, "a block is freed after every use", "max_reuse_distance")
    """Elements computed before the next use below which a parameter is not freed."""
    stage3_module_granularity_threshold: Size = no_effect(
        0, "the unit of gathering is a block of the model", "module_granularity_threshold"
    )
    """Average size below which the children of a module are gathered together."""
    stage3_use_all_reduce_for_fetch_params: Flag = no_effect(
        False, "parameters are always gathered by all-gather", "use_all_reduce_for_fetch_params"
    )
    """Gather parameters by all-reduce."""
    stage3_allgather_sequential: Flag = no_effect(
        False, "a block is always gathered by one collective", "allgather_sequential"
    )
    """Gather one parameter at a time."""
    memory_efficient_linear: Flag = no_effect(True, "no function of torch is replaced")
    """Use a linear function that saves less for the backward pass."""
    override_module_apply: Flag = no_effect(True, "writes inside zero.Init always see whole parameters")
    """Gather parameters inside `Module.apply`."""
    mics_hierarchical_params_gather: Flag = no_effect(False, "a shard group is gathered by one collective")
    """Gather inside nodes first when a shard group spans several."""
    log_trace_cache_warnings: Flag = no_effect(False, "the order of gathering is planned, not traced")
    """Warn when the traced order of gathering changes."""
    save_muon_momentum_buffer_in_memory: Flag = no_effect(False, "optimizer states rest where offload_optimizer says")
    """Keep Muon's momentum on the device."""
    legacy_stage1: Flag = refused(False, "the old stage 1 does not exist any more; leave the key out")
    """Use the first implementation of stage 1."""

    cpu_offload: Flag | None = deprecated("zero_optimization.offload_optimizer", _to_offload)
    """Old name of `offload_optimizer` on the CPU."""
    cpu_offload_param: Flag | None = deprecated("zero_optimization.offload_param", _to_offload)
    """Old name of `offload_param` on the CPU."""
    cpu_offload_params: Flag | None = deprecated("zero_optimization.offload_param", _to_offload)
    """Older name of `offload_param` on the CPU."""
    cpu_offload_use_pin_memory: Flag | None = deprecated(message="pin_memory is a key of each offload section")
    """Old switch for pinned host memory."""
    stage3_gather_fp16_weights_on_model_save: Flag | None = deprecated(
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    )
    """Old name of `stage3_gather_16bit_weights_on_model_save`."""

    @classmethod
    def from_old_form(cls, value: Any) -> dict[str, Any] | None:
        """`zero_optimization: true` was stage 1."""
        return {"stage": int(value)} if isinstance(value, bool) else None
