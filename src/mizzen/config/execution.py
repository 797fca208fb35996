"""How a step is executed: number formats, `compile`, `fused`, recomputation, an NVMe drive, and a search for the best.

The formats in which a model computes, accumulates and communicates are `fp16`, `bf16`, `torch_autocast` and `amp`. The
search is `autotuning`; what is tried, and how, is the tuner's business. `sparse_attention` is a section of old files
that nothing reads.
"""

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from mizzen.config.section import (
    Arguments,
    Count,
    Dtype,
    Flag,
    Name,
    NotNegative,
    OpenSection,
    Positive,
    Section,
    Whole,
    Words,
    deprecated,
    lower,
    no_effect,
    refused,
    whole,
)

_PASSES: Final = "a switch of deepcompile, which does not exist here"


class CompileConfig(Section):
    """torch.compile for the blocks of the model, one by one."""

    enabled: Flag = False
    """Compile each repeated block of the model, or the whole model where nothing repeats."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """What inductor optimizes for."""
    backend: Name = "inductor"
    """Backend of torch.compile."""
    dynamic: Flag | None = None
    """Compile for changing shapes; absent does so when a second shape appears."""
    fullgraph: Flag = False
    """Refuse a block that cannot be compiled as one graph."""
    blocks: tuple[Name, ...] = ()
    """Classes or paths of the modules to compile; absent takes the repeated blocks of the model."""

    deepcompile: Flag = refused(
        False,
        "communication overlaps without a change to the graph, so there are no such passes; use compile.enabled",
    )
    """Let the compiler insert gathers and reductions into the graph."""
    passes: tuple[Literal["z1", "z3", "autosp", "autotp"], ...] | None = no_effect(None, _PASSES)
    """Graph passes to run; absent takes those of the ZeRO stage."""
    free_activation: Flag = no_effect(False, _PASSES)
    """Free activations inside the graph as soon as they are no longer needed."""
    free_activation_threshold: Whole = no_effect(10_485_760, _PASSES)
    """Bytes from which an activation is freed early."""
    offload_activation: Flag = no_effect(False, f"{_PASSES}; see activation_checkpointing.cpu_checkpointing")
    """Move activations to the host between forward and backward."""
    offload_activation_pin_memory: Flag = no_effect(True, _PASSES)
    """Use pinned host memory for these activations."""
    offload_opt_states: Flag = no_effect(False, f"{_PASSES}; see zero_optimization.offload_optimizer")
    """Move optimizer states to the host while the graph runs."""
    offload_parameters: Flag = no_effect(False, f"{_PASSES}; see zero_optimization.offload_param")
    """Move parameters to the host while the graph does not need them."""
    double_buffer: Flag = no_effect(True, _PASSES)
    """Fill one communication buffer while the other is sent."""
    symmetric_memory: Flag = no_effect(False, _PASSES)
    """Gather through symmetric memory inside a node."""
    debug_log: Flag = no_effect(False, f"{_PASSES}; TORCH_LOGS shows what torch.compile does")
    """Write what each pass did to the graph."""
    sync_before_reduce: Flag = no_effect(False, _PASSES)
    """Synchronize the device before each reduction, to find errors."""
    sync_after_reduce: Flag = no_effect(False, _PASSES)
    """Synchronize the device after each reduction, to find errors."""
    sync_before_allgather: Flag = no_effect(False, _PASSES)
    """Synchronize the device before each gather, to find errors."""
    sync_after_allgather: Flag = no_effect(False, _PASSES)
    """Synchronize the device after each gather, to find errors."""
    keep_int_input_tensors: Flag = no_effect(True, _PASSES)
    """Keep integer inputs of the graph for the backward pass."""
    keep_all_input_tensors: Flag = no_effect(False, _PASSES)
    """Keep all inputs of the graph for the backward pass."""


class FusedConfig(Section):
    """Parts of a model by fused operations, which round in other places than the model's own code."""

    head_loss: Flag = False
    """Compute head and loss over chunks of tokens, without all logits; `output.logits` is computed when it is read."""
    head_chunk: Whole = 0
    """Tokens of such a chunk; 0 chooses by the sizes of batch and vocabulary."""
    head_labelled: Flag | None = None
    """Leave tokens without a label out of the head; absent, masked language models do and causal ones do not."""
    rms_norm: Flag = False
    """Compute each RMSNorm by torch's own kernel; left to the compiler under `compile.enabled`."""
    rotary: Flag = False
    """Turn queries and keys by one kernel each; left to the compiler under `compile.enabled`."""
    swiglu: Flag = False
    """Compute silu(gate) * up by one kernel; left to the compiler under `compile.enabled`."""


class HybridEngineConfig(Section):
    """One set of weights that is trained and sampled from in turn."""

    enabled: Flag = False
    """Give the engine a `generate` of its own."""
    max_out_tokens: Count = 512
    """Largest number of tokens of prompt and answer together."""
    inference_tp_size: Count = 1
    """Ranks that share each layer while sampling."""
    release_inference_cache: Flag = False
    """Give the memory of keys and values back after each generation."""
    enable_cuda_graph: Flag = False
    """Sample through CUDA graphs."""
    pin_parameters: Flag = True
    """Gather all parameters once per generation instead of block by block."""
    tp_gather_partition_size: Count = no_effect(8, "each block is gathered by one collective")
    """Layers gathered together while sampling with several ranks."""


class ActivationCheckpointingConfig(Section):
    """What backward computes again instead of finding it kept, and where the inputs that it needs for that rest."""

    mode: Literal["off", "full", "selective"] = "off"
    """What backward computes again: nothing, whole blocks, or all of a block but matrix products and attention."""
    every: Count = 1
    """Compute only every n-th block again."""
    blocks: tuple[Name, ...] = ()
    """Classes or paths of the modules to compute again; absent takes the repeated blocks of the model."""

    partition_activations: Flag = False
    """Keep each input once per tensor-parallel group, in parts; one rank has nothing to split."""
    cpu_checkpointing: Flag = False
    """Keep the inputs of blocks that are computed again, and of `checkpointing.checkpoint`, in host memory."""
    profile: Flag = no_effect(False, "wall_clock_breakdown times a step, torch.profiler what is inside")
    """Time the forward and backward passes of checkpointed blocks."""
    number_checkpoints: Count | None = no_effect(None, "buffers need no count")
    """Number of checkpoints, for the contiguous buffer."""
    contiguous_memory_optimization: Flag = no_effect(False, "torch's allocator keeps memory in one piece")
    """Keep activations in one contiguous buffer."""
    synchronize_checkpoint_boundary: Flag = no_effect(False, "streams are ordered by events")
    """Synchronize the device around each checkpoint."""


class AioConfig(Section):
    """How tensors travel between host memory and NVMe."""

    block_size: Count = 1_048_576
    """Bytes of one read or write, rounded up to a multiple of 4096; several drives are striped by it."""
    queue_depth: Count = 8
    """Reads and writes under way at once, each in a thread of its own."""
    intra_op_parallelism: Count = 1
    """Multiplies `queue_depth`: in files that were written for libaio it says how many threads have such a queue."""
    direct: Flag = True
    """Read and write past the page cache, where the filesystem can; false keeps what was written in free memory."""
    verify: Flag = True
    """Keep a hash of every block in memory, and compare it whenever the block is read."""
    single_submit: Flag = no_effect(False, "threads read and write directly, without libaio")
    """Submit requests one by one."""
    overlap_events: Flag = no_effect(True, "threads read and write directly, without libaio")
    """Submit requests while others complete."""
    use_gds: Flag = no_effect(False, "tensors pass through pinned host memory")
    """Read into device memory by GPUDirect Storage."""
    thread_count: Count | None = deprecated("aio.intra_op_parallelism")
    """Old name of `intra_op_parallelism`."""


class SparseAttentionConfig(Section):
    """A pattern of blocks that attend to each other."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = "fixed"
    """Kind of pattern."""
    block: Count = 16
    """Tokens in a block."""
    different_layout_per_head: Flag = False
    """Give each head a pattern of its own."""
    num_local_blocks: Count = 4
    """Blocks in a local window."""
    num_global_blocks: Count = 1
    """Blocks of a window to which all others attend."""
    attention: Literal["bidirectional", "unidirectional"] = "bidirectional"
    """Whether tokens attend to later ones."""
    horizontal_global_attention: Flag = False
    """Let global blocks attend to all others, too."""
    num_different_global_patterns: Count = 1
    """Patterns of global blocks, over the heads."""
    num_random_blocks: Whole = 0
    """Further blocks chosen at random."""
    local_window_blocks: tuple[Count, ...] = (4,)
    """Sizes of the local windows, in blocks."""
    global_block_indices: tuple[Whole, ...] = (0,)
    """First blocks of the global ranges."""
    global_block_end_indices: tuple[Whole, ...] | None = None
    """Ends of the global ranges; absent means single blocks."""
    num_sliding_window_blocks: Count = 3
    """Blocks in a sliding window."""


_Power = Annotated[int, Field(ge=0, le=126), BeforeValidator(whole), Words("whole number 0..126")]


class Fp16Config(Section):
    """Half precision with fp32 masters and loss scaling."""

    enabled: Flag = False
    """Hold parameters and compute in fp16."""
    auto_cast: Flag = False
    """Cast floating-point inputs of the model to fp16."""
    loss_scale: NotNegative = 0.0
    """A fixed loss scale; 0 means a dynamic one."""
    initial_scale_power: _Power = 16
    """The dynamic scale starts at 2 to this power."""
    loss_scale_window: Count = 1000
    """Steps without overflow after which the dynamic scale is doubled."""
    hysteresis: Count = 2
    """Overflows after which the dynamic scale is halved."""
    consecutive_hysteresis: Flag = False
    """Count only overflows in a row; otherwise the count starts again when the scale is raised."""
    min_loss_scale: Positive = 1.0
    """Least dynamic scale; an overflow at this scale is an error."""
    fp16_master_weights_and_grads: Flag = False
    """Keep masters and gradients in fp16 as well, for sharded optimizer states, which stay in fp32."""
    fused_mode: Flag = no_effect(True, "the optimizer step is fused wherever the device can do it")
    """Use the fused fp16 optimizer."""


class Bf16Config(Section):
    """Brain floating point with fp32 masters; it needs no loss scaling."""

    enabled: Flag = False
    """Hold parameters and compute in bf16."""
    check_grad_overflow: Flag = no_effect(True, "a step whose gradients are not finite is always skipped, and said")
    """Whether to look for gradients that are not finite."""
    bf16_master_weights_and_grads: Flag = False
    """Keep masters and gradients in bf16 as well, for sharded optimizer states."""
    bf16_optimizer_states: Flag = False
    """Keep the moments in bf16 as well; needs bf16 masters."""
    immediate_grad_update: Flag = no_effect(False, "gradients are added to the fp32 sum as soon as they appear")
    """Add each gradient to its fp32 sum inside the backward pass."""


class AmpConfig(OpenSection):
    """Mixed precision by NVIDIA apex; further keys were arguments of `apex.amp.initialize`."""

    enabled: Flag = refused(False, "apex has been replaced by torch itself; use torch_autocast, bf16 or fp16")
    """Hand the model to apex."""


class AutocastConfig(Section):
    """torch's own mixed precision: parameters stay as they are, operations choose their format."""

    enabled: Flag = False
    """Run the model under `torch.autocast`."""
    dtype: Dtype = "bf16"
    """Format of the operations that may be lower; with fp16, losses are scaled as section fp16 says."""
    lower_precision_safe_modules: tuple[Name, ...] | None = no_effect(
        None, "torch chooses by operation, and gradients travel in communication_data_type"
    )
    """Classes whose gradients travel in the lower format."""


class DataTypesConfig(Section):
    """Formats that differ from the one the model computes in."""

    grad_accum_dtype: Dtype | None = None
    """Format in which gradients accumulate over micro-steps; absent means fp32."""
    param_dtype: Dtype | None = no_effect(None, "it can only repeat the enabled precision, and is checked against it")
    """Format of the parameters."""
    buffer_dtype: Dtype | None = None
    """Format of the model's buffers; absent leaves them as they are."""


class ModelInfoConfig(Section):
    """What is known of the model beforehand."""

    profile: Flag = False
    """Measure the model first."""
    num_params: Count | None = None
    """Parameters of the model."""
    hidden_size: Count | None = None
    """Width of the model."""
    num_layers: Count | None = None
    """Depth of the model."""


class AutotuningConfig(Section):
    """A search over configurations, each tried in a short run."""

    enabled: Flag = False
    """Search instead of training."""
    fast: Flag = True
    """Try micro-batch sizes only; false also tries bucket sizes and the like."""
    metric: Annotated[Literal["throughput", "latency", "flops"], BeforeValidator(lower)] = "throughput"
    """What is to be best."""
    metric_path: Name | None = None
    """File to which a trial writes its result; absent uses the engine's own."""
    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"
    """In which order configurations are tried."""
    tuner_early_stopping: Whole = 5
    """Trials without improvement after which the search ends; 0 never ends it early."""
    tuner_num_trials: Count = 50
    """Most trials in one space."""
    start_profile_step: Count = 3
    """First step of a trial that is measured."""
    end_profile_step: Count = 5
    """Step after which a trial ends."""
    min_train_batch_size: Count = 1
    """Smallest batch size to try."""
    max_train_batch_size: Count | None = None
    """Largest batch size to try; absent sets no limit."""
    min_train_micro_batch_size_per_gpu: Count = 1
    """Smallest micro-batch to try."""
    max_train_micro_batch_size_per_gpu: Count = 1024
    """Largest micro-batch to try."""
    num_tuning_micro_batch_sizes: Count = 3
    """Micro-batch sizes to try."""
    mp_size: Count = 1
    """Ranks that share one copy of the model."""
    model_info: ModelInfoConfig | None = None
    """What is known of the model; absent measures it."""
    model_info_path: Name | None = None
    """File with what is known of the model."""
    arg_mappings: Arguments | None = None
    """Key of the configuration -> flag of the training script that must follow it."""
    results_dir: Name = "autotuning_results"
    """Folder for the results."""
    exps_dir: Name = "autotuning_exps"
    """Folder for the configurations that are tried."""
    overwrite: Flag = True
    """Try again what an earlier search has tried."""
