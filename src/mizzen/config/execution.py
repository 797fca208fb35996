"""How a step is executed: `compile`, and `hybrid_engine`, which samples from the model that it trains."""

from typing import Literal

from mizzen.config.section import Section, no_effect
from mizzen.config.values import Count, Flag, Name, Whole


class CompileConfig(Section):
    """torch.compile for the blocks of the model, and the passes of the compiler that work on its graph."""

    enabled: Flag = False
    """Compile each repeated block of the model."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """What torch.compile optimizes for."""
    backend: Name = "inductor"
    """Backend of torch.compile."""
    dynamic: Flag | None = None
    """Compile for changing shapes; absent does so when a second shape appears."""
    fullgraph: Flag = False
    """Refuse a block that cannot be compiled as one graph."""

    deepcompile: Flag = False
    """Let the compiler insert gathers and reductions into the graph."""
    passes: tuple[Literal["z1", "z3", "autosp", "autotp"], ...] | None = None
    """Graph passes to run; absent takes those of the ZeRO stage."""
    free_activation: Flag = False
    """Free activations inside the graph as soon as they are no longer needed."""
    free_activation_threshold: Whole = 10_485_760
    """Bytes from which an activation is freed early."""
    offload_activation: Flag = False
    """Move activations to the host between forward and backward."""
    offload_activation_pin_memory: Flag = True
    """Use pinned host memory for these activations."""
    offload_opt_states: Flag = False
    """Move optimizer states to the host while the graph runs."""
    offload_parameters: Flag = False
    """Move parameters to the host while the graph does not need them."""
    double_buffer: Flag = True
    """Fill one communication buffer while the other is sent."""
    symmetric_memory: Flag = False
    """Gather through symmetric memory inside a node."""
    debug_log: Flag = False
    """Write what each pass did to the graph."""
    sync_before_reduce: Flag = False
    """Synchronize the device before each reduction, to find errors."""
    sync_after_reduce: Flag = False
    """Synchronize the device after each reduction, to find errors."""
    sync_before_allgather: Flag = False
    """Synchronize the device before each gather, to find errors."""
    sync_after_allgather: Flag = False
    """Synchronize the device after each gather, to find errors."""
    keep_int_input_tensors: Flag = True
    """Keep integer inputs of the graph for the backward pass."""
    keep_all_input_tensors: Flag = False
    """Keep all inputs of the graph for the backward pass."""


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
