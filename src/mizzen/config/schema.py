"""The configuration as a whole: every top-level key, and every value with its origin, for a program or for people.

Sections live beside it, one file per topic. Printing derives nothing.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

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
    fate_of,
    flag,
    keys_of,
    lower,
    no_effect,
    refused,
    section,
)
from mizzen.config.zero import OffloadConfig, ZeroConfig

if TYPE_CHECKING:
    from rich.table import Table


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
    offload: OffloadConfig | None = None
    """Byte budgets for masters and optimizer states; absent keeps all on the device, unless `zero_optimization` has an
    offload section."""
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


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a configuration: where it stands, what it is, and who said so."""

    path: str
    value: Any
    origin: Origin


def values(config: Config, *, defaults: bool = True) -> Iterator[Value]:
    """Every value in the order of the schema; without `defaults` only what was given or derived."""
    for path, value in _leaves(config, ""):
        origin = config.origin(path)
        if defaults or origin.kind != "default":
            yield Value(path, value, origin)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    children = dict(_children(value))
    if not children:
        yield path, plain(value)
    for key, child in children.items():
        yield from _leaves(child, f"{path}.{key}" if path else key)


@cache
def _own_names(section: type[Section]) -> tuple[str, ...]:
    """The fields that hold something themselves."""
    return tuple(name for name, field in section.model_fields.items() if fate_of(field).kind != "moved")


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Section):
        yield from ((name, value.__dict__[name]) for name in _own_names(type(value)))
        yield from (value.model_extra or {}).items()
    elif isinstance(value, Mapping):
        yield from value.items()


def plain(value: Any) -> Any:
    """The value as JSON would hold it."""
    if isinstance(value, Section | Mapping):
        return {key: plain(child) for key, child in _children(value)}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def as_json(config: Config) -> str:
    """The configuration as a text, the same for equal ones."""
    return json.dumps(config, default=_opened, sort_keys=True)


def _opened(value: Any) -> Any:
    """What JSON does not have itself, by one level."""
    if isinstance(value, Section | Mapping):
        return dict(_children(value))
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def display(value: Any) -> str:
    """The value for people: as in JSON, but numbers above 1,000 in scientific notation, with every digit."""
    match plain(value):
        case bool(flag):
            return "true" if flag else "false"
        case None:
            return "null"
        case int() | float() as number:
            return _scientific(number) if abs(number) > 1000 else repr(number)
        case list(items):
            return f"[{', '.join(display(item) for item in items)}]"
        case dict(members):
            return f"{{{', '.join(f'{key}: {display(member)}' for key, member in members.items())}}}"
        case text:
            return json.dumps(text, ensure_ascii=False)


def _scientific(number: float) -> str:
    """5e+08 for 500,000,000. `format` would round 123,456,789 to six places, hence the digits themselves."""
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    if not isinstance(exponent, int):  # infinite
        return repr(number)
    text = "".join(map(str, digits))
    fraction = text[1:].rstrip("0")
    return f"{'-' * sign}{text[0]}{'.' * bool(fraction)}{fraction}e+{len(text) - 1 + exponent:02}"


def as_lines(found: Iterable[Value]) -> list[str]:
    """One line per value: path, value and origin in columns."""
    rows = [(item.path, display(item.value), str(item.origin)) for item in found]
    path_width, value_width = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    return [f"{path:{path_width}}  {value:{min(value_width, 40)}}  {origin}" for path, value, origin in rows]


def as_dict(found: Iterable[Value]) -> dict[str, dict[str, Any]]:
    """Path -> value and origin, for JSON; numbers stay as they are."""
    return {item.path: {"value": item.value, "origin": str(item.origin)} for item in found}


def as_table(found: Iterable[Value]) -> "Table":
    """A table for a terminal."""
    from rich.table import Table  # 60 ms that plain output does not pay

    table = Table("key", "value", "origin", box=None, header_style="bold")
    styles = {"given": "", "derived": "cyan", "default": "dim"}
    for item in found:
        table.add_row(item.path, display(item.value), str(item.origin), style=styles[item.origin.kind])
    return table
