"""The layers of a model that is written as a list of them, as values: what a pipeline is cut by."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerSketch:
    """One layer of a model that is written as a list of layers."""

    path: str
    """Of its module; empty for a plain function. Layers that share a module have one path."""
    kind: str
    """The name of its class, or of the function."""


@dataclass(frozen=True, slots=True)
class LayerList:
    """How a model that is written as a list of layers wants to be cut."""

    layers: tuple[LayerSketch, ...]
    partition: str
    """How layers are dealt out to stages."""
    weights: tuple[float, ...] = ()
    """What each layer costs, where it was measured."""
