"""Keys that are parsed and checked but whose capability does not exist yet. The plan refuses them by name.

Each later capability deletes its rows. A row covers everything below its path.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from mizzen.config.schema import Config
from mizzen.config.section import Section, fate_of


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """One path and the capability that will read it. A value that differs from the default asks for it."""

    path: str
    capability: str
    switches: tuple[str, ...] = ()
    """The keys below it that ask, where the others say how; none means that all ask."""
    inert: tuple[Any, ...] = ()
    """Values beside the default that ask for nothing."""
    instead: str = "leave the key out"
    asks: bool = True
    """False for what only says how: it is refused with what it belongs to."""

    def asked_for(self, config: Config, default: Config) -> Iterator[str]:
        """The paths at which this configuration asks for the capability."""
        paths = [f"{self.path}.{switch}" for switch in self.switches] or [self.path]
        for path in paths if self.asks else ():
            value = config.at(path)
            if value not in self.inert and _differs(value, default.at(path)):
                yield path


def _differs(value: Any, default: Any) -> bool:
    """Whether a value asks for more than its default does; keys that are never read do not count."""
    if isinstance(value, Section) and isinstance(default, Section):
        read = [name for name, field in type(value).model_fields.items() if fate_of(field).kind == "read"]
        return any(_differs(value.__dict__[name], default.__dict__[name]) for name in read)
    return bool(value) and value != default


_ON: Final = ("enabled",)
_TECHNIQUES: Final = (
    "layer_reduction.enabled",
    "weight_quantization.shared_parameters.enabled",
    "activation_quantization.shared_parameters.enabled",
    "sparse_pruning.shared_parameters.enabled",
    "row_pruning.shared_parameters.enabled",
    "head_pruning.shared_parameters.enabled",
    "channel_pruning.shared_parameters.enabled",
)

UNBUILT: Final = (
    Unbuilt("sequence_parallel_size", "sequence parallelism"),
    Unbuilt("seq_parallel_communication_data_type", "sequence parallelism", asks=False),
    Unbuilt("expert_parallel", "expert parallelism", _ON),
    Unbuilt("hybrid_engine", "the hybrid engine", _ON),
    Unbuilt("compression_training", "compression", _TECHNIQUES),
    Unbuilt("weight_quantization", "quantized weights", ("enabled", "quantized_initialization", "post_init_quant")),
    Unbuilt("data_efficiency", "data efficiency", _ON),
    Unbuilt("curriculum_learning", "curriculum learning", _ON),
    Unbuilt("autotuning", "autotuning", _ON),
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One capability that a configuration asks for in vain."""

    path: str
    capability: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}: {self.capability} is not built yet; {self.instead}"


@cache
def _nothing_given() -> Config:
    """A configuration without a key, to compare with."""
    return Config.model_construct()


def refusals(config: Config) -> Iterator[Refusal]:
    """Every capability asked for that does not exist."""
    default = _nothing_given()
    for row in UNBUILT:
        for path in row.asked_for(config, default):
            yield Refusal(path, row.capability, row.instead)
