"""Sections of old files that nothing reads any more, there or here. Whoever still has them is told so."""

from typing import Literal

from mizzen.config.section import Count, Flag, Name, OpenSection, Positive, Section, Whole, refused, section


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


class EigenvalueConfig(Section):
    """Largest eigenvalue of each layer's Hessian, as a guide for quantization."""

    enabled: Flag = refused(False, "switched off where it comes from, and not built here; leave it out")
    """Compute it."""
    verbose: Flag = False
    """Print it."""
    max_iter: Count = 100
    """Most iterations."""
    tol: Positive = 1e-2
    """Relative change below which iteration ends."""
    stability: Positive = 1e-6
    """Added to a norm before division."""
    gas_boundary_resolution: Count = 1
    """Optimizer steps between computations."""
    layer_name: Name = "bert.encoder.layer"
    """Where the layers are in the model."""
    layer_num: Whole = 0
    """Layers of the model."""


class QuantizeTrainingConfig(OpenSection):
    """The first form of quantization while training; further keys are not looked at."""

    enabled: Flag = refused(False, "an old form; use compression_training.weight_quantization")
    """Quantize weights while training."""
    eigenvalue: EigenvalueConfig = section(EigenvalueConfig)
    """Largest eigenvalue of each layer's Hessian, as a guide."""
