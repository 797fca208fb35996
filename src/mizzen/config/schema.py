"""The configuration as a whole: every top-level key, and where each value comes from.

Sections live beside it, one file per topic.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, PrivateAttr

from mizzen.config.checkpoint import CheckpointConfig, NebulaConfig
from mizzen.config.compression import CompressionConfig, QuantizeTrainingConfig, WeightQuantizationConfig
from mizzen.config.data import DataEfficiencyConfig, LegacyCurriculumConfig, ProgressiveLayerDropConfig
from mizzen.config.elasticity import ElasticityConfig
from mizzen.config.execution import (
    ActivationCheckpointingConfig,
    AioConfig,
    AmpConfig,
    AutocastConfig,
    AutotuningConfig,
    Bf16Config,
    CompileConfig,
    DataTypesConfig,
    Fp16Config,
    FusedConfig,
    HybridEngineConfig,
    SparseAttentionConfig,
)
from mizzen.config.observe import (
    CometConfig,
    CommsLoggerConfig,
    CsvConfig,
    FlopsProfilerConfig,
    JsonlConfig,
    ProfileConfig,
    ProgressConfig,
    TensorboardConfig,
    TimersConfig,
    WandbConfig,
)
from mizzen.config.optimizer import OptimizerConfig, SchedulerConfig
from mizzen.config.parallel import ExpertParallelConfig, PipelineConfig, TensorParallelConfig
from mizzen.config.section import (
    AnyValue,
    Count,
    Dtype,
    Flag,
    NotNegative,
    Positive,
    Section,
    Size,
    Whole,
    also_spelled,
    deprecated,
    flag,
    keys_of,
    lower,
    no_effect,
    refused,
    section,
)
from mizzen.config.zero import ZeroConfig

AS_AUTO: Final = 'asked for as "auto"'
"""The note of a value that the file leaves open."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of one value, with a note such as `from train_batch_size` or `as zero_optimization.cpu_offload`."""

    kind: Literal["given", "derived", "default"] = "default"
    note: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.note}".strip()


def _never_if_infinite(value: Any) -> Any:
    """Clients switch printing off with an infinite interval."""
    return None if isinstance(value, float) and value == math.inf else value


def _to_fp32(value: Any) -> Any:
    """`fp32_allreduce: true` in today's words."""
    return "fp32" if flag(value) else None


class Config(Section):
    """Everything a user may say about a run, parsed and frozen."""

    train_batch_size: Count | None = None
    """Samples per optimizer step over all data-parallel ranks: micro batch x accumulation x data-parallel ranks."""
    train_micro_batch_size_per_gpu: Count | None = None
    """Samples per forward pass on one rank."""
    gradient_accumulation_steps: Count | None = None
    """Forward and backward passes per optimizer step."""
    managed_gradient_accumulation: Flag = True
    """Let the engine count passes up to the optimizer step; false makes every `step()` an optimizer step."""
    elasticity: ElasticityConfig = section(ElasticityConfig)
    """A range of batch sizes and GPUs from which the batch is chosen."""
    dataloader_drop_last: Flag = False
    """Leave out the last batch of an epoch if it is not full."""

    optimizer: OptimizerConfig | None = None
    """The optimizer by name; absent takes the one handed to `initialize`."""
    scheduler: SchedulerConfig | None = None
    """The learning-rate schedule by name; absent takes the one handed to `initialize`, or none."""
    gradient_clipping: NotNegative = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    max_consecutive_skips: Whole = 8
    """Skipped steps in a row after which training stops with an error; 0 never stops. A search for a loss scale counts
    only where the loss itself is not finite."""

    fp16: Fp16Config = section(Fp16Config)
    """Half precision with loss scaling."""
    bf16: Bf16Config = also_spelled(Bf16Config, "bfloat16")
    """Brain floating point."""
    torch_autocast: AutocastConfig = section(AutocastConfig)
    """torch's own mixed precision."""
    data_types: DataTypesConfig = section(DataTypesConfig)
    """Formats that differ from the one the model computes in."""
    communication_data_type: Dtype | None = None
    """Format in which gradients are reduced; absent means fp32."""
    seq_parallel_communication_data_type: Dtype = also_spelled("fp32", "seq_parallel_comm_data_type")
    """Format in which gradients are reduced over sequence-parallel ranks."""
    prescale_gradients: Flag = False
    """Divide gradients before they are summed over the ranks instead of after."""
    gradient_predivide_factor: Positive = 1.0
    """The part of the division by the number of ranks that happens before the sum, unless `prescale_gradients` puts all
    of it there."""
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(lower)] = "mean"
    """Whether gradients are averaged or summed over the data-parallel ranks."""
    sparse_gradients: Flag = False
    """Exchange gradients of embeddings as rows instead of whole tables."""

    zero_optimization: ZeroConfig = section(ZeroConfig)
    """How training state is sharded over the data-parallel ranks."""
    data_parallel_size: Count | None = None
    """Data-parallel ranks; absent takes what the other degrees leave of the world."""
    data_parallel_replicate_size: Count = 1
    """Copies of the sharded state: it is sharded inside groups of data-parallel ranks and replicated over so many."""
    pipeline_parallel_size: Count = 1
    """Stages into which the model is cut."""
    tensor_parallel_size: Count = 1
    """Ranks among which a model comes split already, by its own layers, as Megatron's do; an mpu says so too."""
    sequence_parallel_size: Count = 1
    """Ranks that share each sequence."""
    tensor_parallel: TensorParallelConfig = section(TensorParallelConfig)
    """Layers split over ranks."""
    expert_parallel: ExpertParallelConfig = section(ExpertParallelConfig)
    """Experts of a mixture model dealt out to ranks."""
    use_data_before_expert_parallelism: Flag = False
    """Give neighbouring ranks to data parallelism of experts rather than to different experts."""
    pipeline: PipelineConfig = section(PipelineConfig)
    """How a pipelined model runs."""

    activation_checkpointing: ActivationCheckpointingConfig = section(ActivationCheckpointingConfig)
    """How activations of recomputed blocks are kept."""
    aio: AioConfig = section(AioConfig)
    """How tensors travel between host memory and NVMe."""
    compile: CompileConfig = section(CompileConfig)
    """torch.compile, and passes on its graph."""
    fused: FusedConfig = section(FusedConfig)
    """Fused operations in the place of a model's own code."""
    hybrid_engine: HybridEngineConfig = section(HybridEngineConfig)
    """Train and sample one set of weights."""
    compression_training: CompressionConfig = section(CompressionConfig)
    """Quantization and pruning while training."""
    weight_quantization: WeightQuantizationConfig | None = None
    """Weights that are kept in few bits."""
    data_efficiency: DataEfficiencyConfig = section(DataEfficiencyConfig)
    """Curricula, dynamic batches and dropped tokens."""
    curriculum_learning: LegacyCurriculumConfig = section(LegacyCurriculumConfig)
    """A curriculum that the model itself applies."""
    progressive_layer_drop: ProgressiveLayerDropConfig = section(ProgressiveLayerDropConfig)
    """Layers that are skipped at random."""

    seed: Whole | None = None
    """Seed of every random choice; absent takes torch's seed on rank 0."""
    dropout_stream: Literal["engine", "torch"] = "engine"
    """Where dropout draws from: a stream per data-parallel rank, or torch's own generator, as under DDP."""
    deterministic: Flag = False
    """Give bitwise the same numbers at the same layout, also on a GPU; slower."""
    communication_timeout: Positive = 10.0
    """Minutes after which a collective that some rank has not joined is an error."""
    hang_timeout: NotNegative = 300.0
    """Seconds that a rank may wait inside one of our calls before the job counts as hung; 0 never counts."""
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    """How training state is saved, kept and loaded."""

    steps_per_print: Annotated[Count | None, BeforeValidator(_never_if_infinite)] = None
    """Optimizer steps between two lines of progress and throughput; absent or infinite prints none."""
    wall_clock_breakdown: Flag = False
    """Time each phase of a step."""
    memory_breakdown: Flag = False
    """Print memory around each phase of a step."""
    dump_state: Flag = False
    """Print the resolved configuration and the engine's state when the engine is built."""
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"] | None, BeforeValidator(lower)] = None
    """Least level of messages to show; absent leaves it alone."""
    timers: TimersConfig = section(TimersConfig)
    """Timers that run in every step."""
    comms_logger: CommsLoggerConfig = section(CommsLoggerConfig)
    """A record of every collective."""
    flops_profiler: FlopsProfilerConfig = section(FlopsProfilerConfig)
    """Operations and time of each module."""
    profile: ProfileConfig = section(ProfileConfig)
    """Traces, memory snapshots, and the peak of the device."""
    tensorboard: TensorboardConfig = section(TensorboardConfig)
    """Numbers as TensorBoard events."""
    wandb: WandbConfig = section(WandbConfig)
    """Numbers for Weights & Biases."""
    csv_monitor: CsvConfig = section(CsvConfig)
    """Numbers as CSV."""
    comet: CometConfig = section(CometConfig)
    """Numbers for Comet."""
    jsonl_monitor: JsonlConfig = section(JsonlConfig)
    """Numbers as JSON lines."""
    progress: ProgressConfig = section(ProgressConfig)
    """A line on the terminal."""
    autotuning: AutotuningConfig = section(AutotuningConfig)
    """A search for the fastest configuration."""

    zero_allow_untested_optimizer: Flag = False
    """Share out parameters among ranks for a rule that mizzen does not know; it must treat each by itself."""
    zero_force_ds_cpu_optimizer: Flag = no_effect(True, "the step on the host is torch's own fused one")
    """Refuse an optimizer of the user's own on the host."""
    graph_harvesting: Flag = no_effect(False, "clipping and step are few fused operations")
    """Run clipping and step as CUDA graphs."""
    vocabulary_size: Count | None = no_effect(None, "sizes are taken from the model")
    """Size of the vocabulary, which should be a multiple of 8."""
    disable_allgather: Flag = no_effect(False, "never read")
    """Use broadcasts instead of all-gather."""
    sparse_attention: SparseAttentionConfig | None = no_effect(None, "never read; attention belongs to the model")
    """A pattern of blocks that attend to each other."""
    quantize_training: QuantizeTrainingConfig = no_effect(
        QuantizeTrainingConfig, "an old form; use compression_training.weight_quantization"
    )
    """The first form of quantization while training."""
    nebula: NebulaConfig = no_effect(NebulaConfig, "the service is not supported; use checkpoint.async_save")
    """Checkpoints by Azure's Nebula service."""
    datastates_ckpt: AnyValue = refused(
        False, "the package is not supported; use checkpoint.async_save, which also writes in the background"
    )
    """Checkpoints by the DataStates package."""
    amp: AmpConfig = section(AmpConfig)
    """Mixed precision by NVIDIA apex."""

    allgather_size: Size | None = deprecated("zero_optimization.allgather_bucket_size")
    """Old name of the bucket size of gathers."""
    fp32_allreduce: Flag | None = deprecated("communication_data_type", _to_fp32)
    """Old switch for fp32 reduction, which is the default here."""

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)

    def at(self, path: str) -> Any:
        """The value at a dotted path, in any accepted spelling; None where there is nothing."""
        value: Any = self
        for part in path.split("."):
            if isinstance(value, Section):
                spellings = keys_of(type(value))
                value = value.__dict__[spellings[part][0]] if part in spellings else (value.model_extra or {}).get(part)
            elif isinstance(value, Mapping):
                value = value.get(part)
            elif isinstance(value, Sequence) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                return None
        return value

    @property
    def computes_in_fp16(self) -> bool:
        """Whether gradients may be too small for their format, so that losses are scaled."""
        return self.fp16.enabled or (self.torch_autocast.enabled and self.torch_autocast.dtype == "fp16")

    def origin(self, path: str) -> Origin:
        """Where the value at a dotted path comes from."""
        return self._origins.get(path, Origin())

    def is_given(self, path: str) -> bool:
        """Whether the user's own file holds this key."""
        return self.origin(path).kind == "given"

    def is_auto(self, path: str) -> bool:
        """Whether the user's own file says "auto" here, and nothing was derived since."""
        return self.origin(path).note == AS_AUTO

    def autos(self) -> tuple[str, ...]:
        """Every path at which the user's own file says "auto", in the order of the schema."""
        order = {name: number for number, name in enumerate(type(self).model_fields)}
        paths = [path for path in self._origins if self.is_auto(path)]
        return tuple(sorted(paths, key=lambda path: (order[path.split(".")[0]], path)))

    def with_origins(self, origins: Mapping[str, Origin]) -> "Config":
        """A copy of this configuration with these origins added."""
        copy = self.model_copy()
        copy._origins = {**self._origins, **origins}
        return copy
