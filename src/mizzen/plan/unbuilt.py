"""Keys that are parsed and checked but whose capability does not exist yet. The plan refuses them by name.

Each later capability deletes its rows. A row covers everything below its path.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from mizzen.config.schema import Config
from mizzen.config.section import Section


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """One path, the capability that will read it, and the values that ask for it (any that is not inert when empty)."""

    path: str
    capability: str
    values: tuple[Any, ...] = ()

    def is_asked_for(self, config: Config) -> bool:
        """Whether this configuration needs the capability."""
        value = config.at(self.path)
        if self.values:
            return value in self.values
        return config.is_given(self.path) and not _is_inert(value)


def _is_inert(value: Any) -> bool:
    """Absent, switched off, or left at what does nothing."""
    if isinstance(value, Section):
        switches = [value.__dict__[name] for name in ("enabled", "device") if name in value.__dict__]
        return any(switch in (False, "none") for switch in switches) or value == type(value).model_construct()
    return value is None or value is False or value in (0, 1, -1) or value == {} or value == []


UNBUILT: Final = (
    Unbuilt("zero_optimization.stage", "ZeRO stage 3", values=(3,)),
    Unbuilt("zero_optimization.offload_param", "parameter offload"),
    Unbuilt("zero_optimization.offload_optimizer", "optimizer offload"),
    Unbuilt("zero_optimization.zenflow", "ZenFlow"),
    Unbuilt("zero_optimization.zero_hpz_partition_size", "ZeRO++"),
    Unbuilt("zero_optimization.zero_quantized_weights", "ZeRO++"),
    Unbuilt("zero_optimization.zero_quantized_nontrainable_weights", "ZeRO++"),
    Unbuilt("zero_optimization.zero_quantized_gradients", "ZeRO++"),
    Unbuilt("zero_optimization.zeropp_loco_param", "ZeRO++"),
    Unbuilt("zero_optimization.mics_shard_size", "MiCS"),
    Unbuilt("zero_optimization.mics_hierarchical_params_gather", "MiCS"),
    Unbuilt("fp16", "fp16 training"),
    Unbuilt("torch_autocast", "autocast"),
    Unbuilt("activation_checkpointing", "activation checkpointing"),
    Unbuilt("pipeline_parallel_size", "pipeline parallelism"),
    Unbuilt("pipeline", "pipeline parallelism"),
    Unbuilt("tensor_parallel", "tensor parallelism"),
    Unbuilt("sequence_parallel_size", "sequence parallelism"),
    Unbuilt("expert_parallel", "expert parallelism"),
    Unbuilt("hybrid_engine", "the hybrid engine"),
    Unbuilt("compile", "compilation"),
    Unbuilt("compression_training", "compression"),
    Unbuilt("weight_quantization", "quantized weights"),
    Unbuilt("data_efficiency", "data efficiency"),
    Unbuilt("curriculum_learning", "curriculum learning"),
    Unbuilt("progressive_layer_drop", "progressive layer drop"),
    Unbuilt("checkpoint", "checkpoints"),
    Unbuilt("aio", "NVMe offload"),
    Unbuilt("flops_profiler", "the flops profiler"),
    Unbuilt("autotuning", "autotuning"),
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One capability that a configuration asks for in vain."""

    path: str
    capability: str

    def __str__(self) -> str:
        return f"{self.path}: {self.capability} is not built yet; leave the key out"


def refusals(config: Config) -> Iterator[Refusal]:
    """Every capability asked for that does not exist."""
    for row in UNBUILT:
        if row.is_asked_for(config):
            yield Refusal(row.path, row.capability)
