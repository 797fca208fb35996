"""How a step is executed: `compile`, `fused`, and `hybrid_engine`, which samples from the model that it trains."""

from typing import Final, Literal

from mizzen.config.section import Count, Flag, Name, Section, Whole, no_effect, refused

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
