"""Analytic cost: the bytes that one rank holds for parameters, gradients, master weights and optimizer states.

Activations depend on the run and are not here; they are measured by simulation.
"""

from dataclasses import dataclass, fields
from typing import Final

from mizzen.config.schema import Config
from mizzen.model.sketch import Sketch

STATES_PER_PARAMETER: Final = {
    "adam": 2,
    "adamw": 2,
    "lamb": 2,
    "nadam": 2,
    "radam": 2,
    "adamax": 2,
    "lion": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "muon": 1,
}
"""Full-size state tensors that an optimizer keeps; a name that is not here counts as 2, the common case."""

_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2}
"""Any other dtype takes one byte."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes on one rank. Costs add up; a change that saves memory is a negative cost."""

    parameters: int = 0
    gradients: int = 0
    masters: int = 0
    states: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(self.__getattribute__(f.name) + other.__getattribute__(f.name) for f in fields(self)))

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.masters + self.states

    def __str__(self) -> str:
        named = [(f.name, self.__getattribute__(f.name)) for f in fields(self)]
        return f"{in_bytes(self.total)} (" + ", ".join(f"{name} {in_bytes(size)}" for name, size in named) + ")"


def in_bytes(size: float) -> str:
    """A size for people: 1.5 GiB, -20.0 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def bytes_of(dtype: str) -> int:
    """The size of one element."""
    return _BYTES.get(dtype, 1)


def replicated(config: Config, sketch: Sketch) -> Cost:
    """The cost of training the model whole on every rank, which every transform then changes."""
    low = "bfloat16" if config.bf16.enabled else "float16" if config.fp16.enabled else None
    held = sum(p.numel * bytes_of(low if low and p.is_floating else p.dtype) for p in sketch.parameters)
    trained = sum(p.numel for p in sketch.parameters if p.requires_grad)
    accumulation = config.data_types.grad_accum_dtype or "fp32"
    name = (config.optimizer.type if config.optimizer else "adamw").lower()
    momentum = config.optimizer.params.get("momentum", 0) if config.optimizer else 0
    states = (1 if momentum else 0) if name == "sgd" else STATES_PER_PARAMETER.get(name, 2)
    return Cost(
        parameters=held,
        gradients=trained * (4 if accumulation == "fp32" else 2),
        masters=4 * trained if low else 0,
        states=4 * states * trained,
    )
