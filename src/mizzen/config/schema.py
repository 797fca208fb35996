"""The configuration as a whole: every top-level key. Sections live beside it, one file per topic."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, PrivateAttr

from mizzen.config.origin import Origin
from mizzen.config.section import Count, Flag, NotNegative, Section, keys_of
from mizzen.config.zero import ZeroConfig


class Config(Section):
    """Everything a user may say about a run, parsed and frozen."""

    train_batch_size: Count | None = None
    """Samples per optimizer step over all data-parallel ranks: micro batch x accumulation x data-parallel ranks."""
    train_micro_batch_size_per_gpu: Count | None = None
    """Samples per forward pass on one rank."""
    gradient_accumulation_steps: Count | None = None
    """Forward and backward passes per optimizer step."""
    gradient_clipping: NotNegative = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    dump_state: Flag = False
    """Print the resolved configuration and the engine's state when the engine is built."""
    zero_optimization: ZeroConfig = Field(default_factory=ZeroConfig)
    """How training state is sharded over the data-parallel ranks."""

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)

    def at(self, path: str) -> Any:
        """The value at a dotted path, in any accepted spelling; None below an absent section."""
        value: Any = self
        for part in path.split("."):
            if isinstance(value, Section):
                spellings = keys_of(type(value))
                value = value.__dict__[spellings[part][0]] if part in spellings else (value.model_extra or {}).get(part)
            elif isinstance(value, Mapping):
                value = value.get(part)
            else:
                return None
        return value

    def origin(self, path: str) -> Origin:
        """Where the value at a dotted path comes from."""
        return self._origins.get(path, Origin())

    def is_given(self, path: str) -> bool:
        """Whether the user's own file holds this key."""
        return self.origin(path).kind == "given"

    def with_origins(self, origins: Mapping[str, Origin]) -> "Config":
        """The same configuration with these origins added."""
        copy = self.model_copy()
        copy._origins = {**self._origins, **origins}
        return copy
