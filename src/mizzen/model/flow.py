"""Which layers of a model read what other layers give: values, which `trace.py` finds by running it once.

A strategy that cuts matrices has to know which layers belong together, whatever they are called: those whose outputs
reach some other layers and nothing else, and what happens on the way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import nn

OUTPUT: Final = ""
"""Stands for what the model returns, where layers are named."""
KINDS: Final = {"Linear.forward": "linear", "Embedding.forward": "embedding", "Conv1D.forward": "transposed"}
"""What layers compute, by the function that computes it: a class of its own with another one is something else."""


def layer_kind(module: "nn.Module") -> str:
    """What a module computes with its weight, as `Layer.kind` says it; empty where it is no such layer."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or type(weight).__name__ == "UninitializedParameter" or weight.dim() != 2:
        return ""
    is_scaled_table = "embed_scale" in dir(module) and "num_embeddings" in vars(module)
    return "embedding" if is_scaled_table else KINDS.get(type(module).forward.__qualname__, "")


@dataclass(frozen=True, slots=True)
class Way:
    """What happens to the output of a layer, or to a parameter, on its way to another layer."""

    reduced: frozenset[int] = frozenset()
    """The sizes of dimensions over which sums were taken, or norms, or a softmax."""
    head: int = 0
    """The size of an attention head, where it went into a product with another activation."""
    value: int = 0
    """The size of a head of values, where it is among what attention adds up."""
    is_random: bool = False
    """Whether dropout was applied."""
    features: frozenset[tuple[int, int]] = frozenset()
    """Which outputs of a layer go this way, as ranges from one to another."""

    def __or__(self, other: "Way") -> "Way":
        return Way(
            self.reduced | other.reduced,
            self.head or other.head,
            self.value or other.value,
            self.is_random or other.is_random,
            self.features | other.features,
        )


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that multiplies with its weight or looks rows up in it, in the order in which layers are called."""

    path: str
    kind: str
    """linear (the weight has outputs first), transposed (inputs first) or embedding."""
    inputs: int
    outputs: int
    reads: Mapping[str, Way]
    """The layers, and the parameters of other modules, whose values reach its input."""
    runs: tuple[int, ...] = ()
    """The sizes of the parts into which its output is split right away, such as Q, K and V."""
    factors: tuple[int, ...] = ()
    """The sizes as which its features are seen right away, such as (heads, size of a head)."""


@dataclass(frozen=True, slots=True)
class Argument:
    """How a module is given something: by its place or by its name, whichever a call uses."""

    place: int
    name: str


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """What a module that is no layer was called with, and what it gave."""

    path: str
    takes: tuple[Argument | None, ...] = ()
    """The activations among its arguments, (samples, tokens, features); None for one inside of something else."""
    gives: int = 0
    """How many such activations it returned; -1 where the first thing that it returned is none."""
    sources: Mapping[str, Way] = field(default_factory=dict)
    """The layers and parameters whose values reach these, and what happens on the way."""
    times: int = 0
    """How often it was called."""


CallPath = tuple[str, ...]
"""The modules in whose forward something happens, from the outermost to the innermost."""


def innermost(place: CallPath) -> str:
    """The module in whose forward something happens, for a sentence."""
    return f"'{place[-1]}'" if place and place[-1] else "the model itself"


@dataclass(frozen=True, slots=True)
class Use:
    """An operation on a parameter, or on an activation that was made in another place."""

    parameter: str
    """The first name of the parameter; empty where it is an activation."""
    made: CallPath
    """Where the activation was made; nowhere for a parameter."""
    used: CallPath
    passed: frozenset[str] = frozenset()
    """The modules, until then, that had the activation as an argument or returned it, just as it is."""


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """An operation beside layers that draws random numbers, or in which tokens meet or change their order."""

    name: str
    place: CallPath
    reads: frozenset[str]
    """The layers and parameters whose values it works on."""
    after: str
    """The layer that was called last before it."""
    draws: bool
    mixes: bool


@dataclass(frozen=True, slots=True)
class Flow:
    """All layers of a model that were called, and what reaches its result."""

    layers: tuple[Layer, ...] = ()
    result: Mapping[str, Way] = field(default_factory=dict)
    trouble: str = ""
    """Why nothing is known: the forward could not be run without values."""
    calls: Mapping[str, ModuleCall] = field(default_factory=dict)
    """The other modules that were given activations, by path, in the order in which they were called."""
    uses: tuple[Use, ...] = ()
    """Where parameters are used, and activations elsewhere than where they are made; what is alike is there once."""
    operations: tuple[TracedOperation, ...] = ()
    """In the order of their calls; what is alike is there once."""

    def by_path(self) -> dict[str, Layer]:
        """Each layer under its path."""
        return {layer.path: layer for layer in self.layers}
