"""How one model is split over ranks: `pipeline`, `tensor_parallel`, `expert_parallel`. Degrees are also at the top."""

from typing import Literal

from mizzen.config.section import (
    AnyValue,
    Count,
    CountOrAuto,
    Dtype,
    Flag,
    Integer,
    Name,
    NumberOrAuto,
    Opaque,
    Pattern,
    Positive,
    Section,
    Text,
    Whole,
    also_spelled,
    no_effect,
    refused,
)


class PipelineConfig(Section):
    """How a model that is cut into pipeline stages runs."""

    schedule: Name | tuple[Text, ...] = "1f1b"
    """Order of forwards and backwards: 1f1b, gpipe, interleaved, looped_bfs, zero_bubble, zbv or dualpipev; or a table
    of your own, one text for each stage such as "0F0 0F1 0B0 0B1" (chunk, letter, micro-batch)."""
    virtual_stages: Count | None = None
    """Chunks of the model on each stage; absent takes as many as the schedule is made for."""
    split_last_backward: Flag = True
    """With schedule 1f1b, compute the last backward of a stage in two halves, so that the stage before it waits less.
    It stays whole where blocks are recomputed or compiled, and at ZeRO stage 3."""
    activation_checkpoint_interval: Whole = 0
    """Layers between recomputed activations of a PipelineModule; 0 recomputes none, or as many as that says itself."""
    pipe_partitioned: Flag = no_effect(True, "activations go from stage to stage whole, on every tensor-parallel rank")
    """Send activations between stages in parts when tensor parallelism holds them more than once."""
    grad_partitioned: Flag = no_effect(True, "their gradients come back whole, on every tensor-parallel rank")
    """Send gradients of activations between stages in parts, likewise."""
    stages: CountOrAuto = no_effect("auto", "never read; use pipeline_parallel_size or PipelineModule(num_stages=...)")
    """Number of stages."""
    partition: Text = "best"
    """How the blocks of a model are dealt out to stages: best and parameters balance parameters, uniform counts blocks,
    type:REGEX those of a class, and profile measures them first. A PipelineModule has its partition_method instead."""
    profile_length: Count = 512
    """Tokens of each sample with which blocks are measured where partition is profile; at most what the model takes."""
    seed_layers: Flag = no_effect(False, "never read; use PipelineModule(seed_layers=...)")
    """Seed each layer by itself."""
    use_reentrant: Flag = no_effect(True, "recomputation is never re-entrant")
    """Use torch's re-entrant recomputation."""


class TensorParallelSizeConfig(Section):
    """The degree in the words of the inference section."""

    tp_size: Count = 1
    """Ranks that share each layer; the same as autotp_size."""
    tp_grain_size: Count = no_effect(1, "not used in training")
    """Granularity of uneven splits."""
    mpu: Opaque = refused(None, "an object has no place in a configuration; use initialize(mpu=...)")
    """A Megatron-style object that knows the groups."""
    tp_group: Opaque = refused(None, "a process group has no place in a configuration; use tp_model_init(tp_group=...)")
    """The process group of the ranks that share each layer."""


class LayerSpecConfig(Section):
    """How the layers that match are split."""

    patterns: tuple[Pattern, ...]
    """Regular expressions; a layer matches if one of them fits the full name of its parameter."""
    partition_type: Literal["column", "row", "skip"] = "column"
    """Split by output features, by input features, or not at all."""
    shape: AnyValue = None
    """Shape in which a fused weight is seen before it is split, such as [3, -1] or [["q", "k", "v"], -1]."""
    partition_dim: Integer | None = None
    """Dimension of that shape along which it is split."""
    model_types: tuple[Name, ...] | None = no_effect(None, "rules are for the model that they come with")
    """Kinds of model to which this applies; absent means all."""
    gather_output: Flag = False
    """Gather the outputs of the layer on every rank."""
    grad_allreduce: Flag = False
    """Sum the gradients of a replicated layer over the ranks."""


class PartitionConfig(Section):
    """Which layers are split, and how."""

    tp_size: Count | None = no_effect(None, "the degree is tensor_parallel.autotp_size")
    """Ranks that share each layer."""
    layer_specs: tuple[LayerSpecConfig, ...] = ()
    """Rules in the order in which they are tried."""
    embedding_partition_dim: Integer = no_effect(
        1, "tables of tokens are cut by rows, so that a vocabulary is shared out"
    )
    """Dimension along which embeddings are split."""
    lm_head_patterns: tuple[Name, ...] = no_effect(
        ("lm_head", "embed_out"), "the layer that makes logits is found by what it gives"
    )
    """Names of the layer that makes the logits."""
    use_default_specs: Flag = True
    """Try the rules of the preset after these."""
    strict_mode: Flag = False
    """Refuse a layer that no rule matches."""


class TensorParallelConfig(Section):
    """Layers split over ranks."""

    autotp_size: Whole = 0
    """Ranks that share each layer; 0 and 1 split nothing."""
    tp_overlap_comm: Flag = False
    """Communicate inside a layer while the layer still computes."""
    sequence_parallel: Flag = False
    """Cut activations between the layers along the sequence: each rank has norms, dropout and what is kept of them for
    some of the tokens. Refused for a model that works on several tokens there."""
    tensor_parallel: TensorParallelSizeConfig = also_spelled(TensorParallelSizeConfig, "tp")
    """The degree in the words of the inference section."""
    partition_config: PartitionConfig | None = None
    """Rules of your own; absent takes the model's own plan, then what its layers read of each other."""
    preset_model: Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None = no_effect(
        None, "layers are found by what they read, whatever the family"
    )
    """Rules made for a family of models."""
    dtype: Dtype = no_effect("fp16", "parameters have the format of the enabled precision section")
    """Format to which the model is converted."""
    injection_policy_tuple: AnyValue = refused(None, "layers are not replaced by name; use partition_config")
    """Names of the layers whose outputs are summed."""
    keep_module_on_host: Flag = no_effect(False, "each rank reads only its own part of a checkpoint")
    """Leave the model on the host while a checkpoint is loaded."""
    replace_with_kernel_inject: Flag = refused(
        False, "a matter of inference; leave the key out of a training file", "kernel_inject"
    )
    """Replace layers by fused inference kernels."""


class ExpertParallelConfig(Section):
    """Experts of a mixture model dealt out to ranks, without changing the model's code."""

    enabled: Flag = False
    """Find the mixture layers of the model and deal out their experts."""
    autoep_size: Count = 1
    """Ranks among which the experts of a layer are dealt out."""
    preset_model: Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3"] | None = None
    """A family of models whose layers are known; absent finds it out from the model."""
    moe_layer_pattern: Pattern | None = None
    """Regular expression for the names of mixture layers."""
    expert_pattern: Name | None = None
    """Name of the experts inside a mixture layer."""
    router_pattern: Name | None = None
    """Name of the router inside a mixture layer."""
    expert_w1: Name | None = None
    """Name of the gate projection inside an expert."""
    expert_w2: Name | None = None
    """Name of the down projection inside an expert."""
    expert_w3: Name | None = None
    """Name of the up projection inside an expert."""
    num_experts_attr: Name | None = None
    """Attribute of the model's configuration that holds the number of experts."""
    top_k_attr: Name | None = None
    """Attribute of the model's configuration that holds the number of experts per token."""
    has_shared_experts: Flag | None = None
    """Whether a mixture layer has experts that see every token; absent finds it out."""
    shared_experts_pattern: Name | None = None
    """Name of the shared experts inside a mixture layer."""
    shared_experts_gate_pattern: Name | None = None
    """Name of the gate of the shared experts."""
    top_k: CountOrAuto = "auto"
    """Experts per token; auto takes it from the model."""
    score_func: Literal["auto", "softmax", "sigmoid"] = "auto"
    """How router logits become scores; auto takes it from the model."""
    score_apply: Literal["auto", "pre", "post"] = "auto"
    """Whether scores multiply the inputs or the outputs of the experts."""
    combine_impl: Literal["auto", "weighted_sum", "legacy_bmm"] = "auto"
    """How the outputs of a token's experts are summed."""
    route_norm: Flag | None = None
    """Whether the scores of a token are normalized to 1; absent takes it from the model."""
    route_scale: Positive = 1.0
    """Factor on the scores."""
    routed_scaling_factor: NumberOrAuto = "auto"
    """Factor on the outputs of the experts; auto takes it from the model."""
    num_expert_groups: Count | None = None
    """Groups of experts among which a token first chooses."""
    num_limited_groups: Count | None = None
    """Groups that a token may choose."""
    use_grouped_mm: Flag = True
    """Compute all experts of a rank by one grouped product."""
    disable_triton_grouped_mm: Flag = False
    """Do not use the Triton form of that product."""
    validate_folding_routing: Flag = False
    """Compare the routing over the tensor-parallel ranks in each step."""
    expert_tensor_parallel_size: Count = refused(1, "experts themselves are not split; leave it at 1")
    """Ranks that share each expert."""
    load_balance_coeff: AnyValue = refused(None, "balancing without a loss does not exist; leave it null")
    """Speed at which a bias balances the experts."""
