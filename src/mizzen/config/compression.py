"""Smaller models: `compression_training` during training, `weight_quantization` for weights that are only used.

`quantize_training` is the first form of it, which nothing reads any more.
"""

from collections.abc import Mapping
from typing import Literal

from mizzen.config.section import (
    Arguments,
    Count,
    Flag,
    Name,
    OpenSection,
    Positive,
    Ratio,
    Section,
    Whole,
    empty,
    refused,
    section,
)


class LayerReductionConfig(Section):
    """A student with fewer layers than its teacher."""

    enabled: Flag = False
    """Start the student from layers of the teacher."""
    keep_number_layer: Count | None = None
    """Layers of the student."""
    module_name_prefix: Name | None = None
    """Where the layers are in the model."""
    teacher_layer: tuple[Whole, ...] = ()
    """Layers of the teacher that the student starts from."""
    other_module_name: tuple[Name, ...] = ()
    """Other modules that the student takes from the teacher."""


class MixedQuantizeConfig(Section):
    """A blend of full and quantized weights that moves over time."""

    enabled: Flag = False
    """Blend instead of switching at once."""
    quantize_change_ratio: Ratio = 0.001
    """How far the blend moves in each step."""


class WeightQuantizationShared(Section):
    """What all groups of quantized weights share."""

    enabled: Flag = False
    """Quantize weights while training."""
    quantizer_kernel: Flag = False
    """Use the fused kernel."""
    schedule_offset: Whole = 0
    """Step at which it starts."""
    quantize_groups: Count = 1
    """Parts of a weight with a scale of their own."""
    quantize_verbose: Flag = False
    """Print each change of bits."""
    quantization_type: Literal["symmetric", "asymmetric"] = "symmetric"
    """Whether the range lies around zero."""
    quantize_weight_in_forward: Flag = False
    """Quantize in the forward pass instead of in the optimizer step."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How values are rounded."""
    fp16_mixed_quantize: MixedQuantizeConfig = section(MixedQuantizeConfig)
    """A blend of full and quantized weights that moves over time."""


class WeightQuantizationParams(Section):
    """Bits of one group of weights."""

    start_bits: Count
    """Bits at the start."""
    target_bits: Count
    """Bits at the end."""
    quantization_period: Whole = 1
    """Steps between two reductions of bits; may be 0 where the bits stay as they are."""


class _Group(Section):
    """The modules that a group consists of."""

    modules: tuple[Name, ...] = ("*",)
    """Parts of module names; * means all modules that can be compressed."""
    related_modules: tuple[tuple[Name, ...], ...] | None = None
    """For each module, others that must lose the same rows, heads or channels."""


class WeightQuantizationGroup(_Group):
    """One group of quantized weights."""

    params: WeightQuantizationParams
    """Bits of this group."""


class WeightQuantizationTraining(Section):
    """Weights with fewer bits."""

    shared_parameters: WeightQuantizationShared = section(WeightQuantizationShared)
    """What all groups share."""
    different_groups: Mapping[str, WeightQuantizationGroup] = empty()
    """Groups by name."""


class ActivationQuantizationShared(Section):
    """What all groups of quantized activations share."""

    enabled: Flag = False
    """Quantize activations while training."""
    quantization_type: Literal["symmetric", "asymmetric"] = "symmetric"
    """Whether the range lies around zero."""
    range_calibration: Literal["dynamic", "static"] = "dynamic"
    """Whether the range is found for each batch or as a running mean."""
    schedule_offset: Whole = 1000
    """Step at which it starts."""


class ActivationQuantizationParams(Section):
    """Bits of one group of activations."""

    bits: Count
    """Bits of an activation."""


class ActivationQuantizationGroup(_Group):
    """One group of quantized activations."""

    params: ActivationQuantizationParams
    """Bits of this group."""


class ActivationQuantization(Section):
    """Activations with fewer bits."""

    shared_parameters: ActivationQuantizationShared = section(ActivationQuantizationShared)
    """What all groups share."""
    different_groups: Mapping[str, ActivationQuantizationGroup] = empty()
    """Groups by name."""


class PruningParams(Section):
    """How much of a group stays."""

    dense_ratio: Ratio
    """Share that stays."""


class PruningGroup(_Group):
    """One group of pruned modules."""

    params: PruningParams
    """How much of this group stays."""


class PruningShared(Section):
    """What all groups of pruned modules share."""

    enabled: Flag = False
    """Prune while training."""
    method: Literal["l1", "topk"] = "l1"
    """How the weak ones are found: by size, or learned."""
    schedule_offset: Whole = 1000
    """Step at which it starts."""


class SparsePruningShared(Section):
    """What all groups of sparse weights share."""

    enabled: Flag = False
    """Prune while training."""
    method: Literal["l1", "topk", "snip_momentum"] = "l1"
    """How the weak ones are found: by size, learned, or by size and gradient."""
    schedule_offset: Whole = 1000
    """Step at which it starts."""
    block_pattern: Name = "4x1"
    """Shape of the blocks that are pruned together, for snip_momentum."""
    dense_ratio: Ratio = 0.1
    """Share that stays, for snip_momentum."""
    schedule_offset_stride: Count = 1
    """Steps between two prunings, for snip_momentum."""
    schedule_offset_end: Whole | None = None
    """Step of the last pruning, for snip_momentum."""
    excluded_modules: tuple[Name, ...] = ()
    """Parts of names of modules that are left alone, for snip_momentum."""


class HeadPruningShared(PruningShared):
    """What all groups of pruned heads share."""

    method: Literal["l1", "topk"] = "topk"
    """How the weak ones are found: by size, or learned."""
    num_heads: Count | None = None
    """Attention heads of a layer; needed when enabled."""


class SparsePruning(Section):
    """Single weights set to zero."""

    shared_parameters: SparsePruningShared = section(SparsePruningShared)
    """What all groups share."""
    different_groups: Mapping[str, PruningGroup] = empty()
    """Groups by name."""


class RowPruning(Section):
    """Rows of linear layers, or channels of convolutions, taken out."""

    shared_parameters: PruningShared = section(PruningShared)
    """What all groups share."""
    different_groups: Mapping[str, PruningGroup] = empty()
    """Groups by name."""


class HeadPruning(Section):
    """Attention heads taken out."""

    shared_parameters: HeadPruningShared = section(HeadPruningShared)
    """What all groups share."""
    different_groups: Mapping[str, PruningGroup] = empty()
    """Groups by name."""


class CompressionConfig(Section):
    """Compression while training, one technique beside the other."""

    layer_reduction: LayerReductionConfig = section(LayerReductionConfig)
    """A student with fewer layers than its teacher."""
    weight_quantization: WeightQuantizationTraining = section(WeightQuantizationTraining)
    """Weights with fewer bits."""
    activation_quantization: ActivationQuantization = section(ActivationQuantization)
    """Activations with fewer bits."""
    sparse_pruning: SparsePruning = section(SparsePruning)
    """Single weights set to zero."""
    row_pruning: RowPruning = section(RowPruning)
    """Rows of linear layers taken out."""
    head_pruning: HeadPruning = section(HeadPruning)
    """Attention heads taken out."""
    channel_pruning: RowPruning = section(RowPruning)
    """Channels of convolutions taken out."""


class WeightQuantizationConfig(Section):
    """Weights that are kept in few bits and widened when they are used; for inference, and for frozen weights."""

    enabled: Flag = False
    """Keep weights in few bits."""
    num_bits: Count = 8
    """Bits of a weight."""
    q_type: Literal["symmetric", "asymmetric"] = "symmetric"
    """Whether the range lies around zero."""
    q_groups: Count = 1
    """Parts of a weight with a scale of their own."""
    quantized_initialization: Arguments = empty()
    """Settings (num_bits, group_size, group_dim, symmetric) for weights quantized inside `zero.Init`."""
    post_init_quant: Arguments = empty()
    """Part of a module name -> such settings, for weights quantized after the model is built."""


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
