"""A model written as a list of layers, of which each stage of a pipeline builds and keeps its own.

Every rank knows all layers: those of other stages are on the meta device until an engine takes the model, and then they
are gone. A layer is built from its own seed, so that its values do not depend on who builds it. How layers are dealt
out is decided by the plan (`cut.py`); here is only what the model is made of and how it runs.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from mizzen.environment import World, environ
from mizzen.errors import UsageError
from mizzen.model.layer_list import LayerList, LayerSketch
from mizzen.model.tree import children_of, with_children
from mizzen.parallel.pipeline.partition import partition

TIED = "tied_modules"
"""Under this name a model has the modules that several layers share."""


class LayerSpec:
    """A layer that is not built yet: a class of modules and its arguments."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not isinstance(typename, type) or not issubclass(typename, nn.Module):
            raise UsageError(f"LayerSpec takes a class of nn.Module and its arguments; this is {typename!r}")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """The layer itself."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        given = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(given)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares its module with all others of its key, wherever they are in the list.

    `forward_fn(module, inputs)` is what this layer does with it, where that is not to call it.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """What a `PipelineModule` was made with, beside its layers."""

    num_stages: int | None = None
    topology: Any = None
    loss_fn: Callable[[Any, Any], Any] | None = None
    seed_layers: bool = False
    seed_fn: Callable[[int], Any] | None = None
    base_seed: int = 1234
    partition_method: str = "parameters"
    activation_checkpoint_interval: int = 0
    activation_checkpoint_func: Callable[..., Any] = partial(checkpoint, use_reentrant=False)
    checkpointable_layers: Sequence[str] | None = None
    example_inputs: Any = None
    """What the first layer takes, to measure layers with."""

    @property
    def stages(self) -> int | None:
        """The number of stages, as far as it was said."""
        if self.num_stages is not None:
            return self.num_stages
        return int(self.topology.get_dim("pipe")) if self.topology is not None else None

    @property
    def tensor_ranks(self) -> int | None:
        """The ranks that share each matrix, where the topology says so of layers that come cut."""
        return int(self.topology.get_dim("model")) or None if self.topology is not None else None


class LayeredModule(nn.Module):
    """Layers one after the other, of which this rank may have only some."""

    def __init__(self, layers: Iterable[Any], options: PipelineOptions) -> None:
        super().__init__()
        self.options = options
        self.loss_fn = options.loss_fn
        self.activation_checkpoint_interval = options.activation_checkpoint_interval
        self.specs = self.every_spec = tuple(layers)
        """Of all layers; `specs` has None for those that are gone."""
        if not self.specs:
            raise UsageError("a PipelineModule without layers: give a list of LayerSpec, modules or functions")
        self._seed = torch.initial_seed()
        self.tied_modules = nn.ModuleDict()
        self.layer_list = LayerList(
            tuple(self._add(number) for number in range(len(self.specs))), options.partition_method
        )
        self.numbers = tuple(range(len(self.specs)))
        """The layers that run here, once the model is cut; all of them before."""
        self.bounds: tuple[int, ...] = ()
        """Where each stage begins, and the end of the last one, as far as it is known."""
        self._build_first()

    def _add(self, number: int) -> LayerSketch:
        spec = self.specs[number]
        if isinstance(spec, LayerSpec):
            name = spec.key if isinstance(spec, TiedLayerSpec) else str(number)
            place: Any = self.tied_modules if isinstance(spec, TiedLayerSpec) else self
            if name not in children_of(place):
                place.add_module(name, _on_meta(spec))
            return LayerSketch(f"{TIED}.{name}" if place is self.tied_modules else name, spec.typename.__name__)
        if isinstance(spec, nn.Module):
            self.add_module(str(number), spec)
            return LayerSketch(str(number), type(spec).__name__)
        if callable(spec):
            return LayerSketch(
                "", str(vars(type(spec)).get("__name__", getattr(spec, "__name__", type(spec).__name__)))
            )
        raise UsageError(
            f"layer {number} is a {type(spec).__name__}; a layer is a LayerSpec, an nn.Module or a function of one "
            "argument"
        )

    def _build_first(self) -> None:
        """Build the layers that this rank has unless the configuration gives it others: it is not known here."""
        world = current_world()
        stages = self.options.stages or (1 if world.size == 1 else None)
        if stages is None or world.size % stages or (world.size == 1 and stages > 1):
            return  # an engine builds them, or says what is wrong
        if stages > 1 and self.layer_list.partition.lower() == "profile":
            return  # nothing is measured yet
        self.bounds = tuple(bounds_of(self, stages))
        stage = world.rank // (world.size // stages)
        self.build(range(self.bounds[stage], self.bounds[stage + 1]))

    # What a rank has of it

    def own_numbers(self) -> tuple[int, ...]:
        """The layers of this rank's stage, as far as it is known yet which those are."""
        if len(self.numbers) < len(self.every_spec) or not self.bounds:
            return self.numbers
        world = current_world()
        stage = world.rank // max(1, world.size // (len(self.bounds) - 1))
        return tuple(range(self.bounds[stage], self.bounds[stage + 1]))

    def build(self, numbers: Iterable[int]) -> None:
        """Build layers that are on the meta device, with the values that their own seeds give."""
        for number in numbers:
            spec, path = self.specs[number], self.layer_list.layers[number].path
            if not isinstance(spec, LayerSpec) or not is_on_meta(self.get_submodule(path)):
                continue
            first = next(at for at, layer in enumerate(self.layer_list.layers) if layer.path == path)
            with self._seeded(first):
                built = self.specs[first].build()
            planned = dict(self.get_submodule(path).named_parameters())
            for name, parameter in built.named_parameters():
                parameter.requires_grad_(planned[name].requires_grad)
            built.train(self.training)
            parent, _, leaf = path.rpartition(".")
            self.get_submodule(parent).add_module(leaf, built)

    @contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        """Random numbers of a layer's own; the process's go on afterwards as if nothing had been."""
        options = self.options
        with torch.random.fork_rng():
            if options.seed_layers and options.seed_fn is not None:
                options.seed_fn(options.base_seed + number)
            elif options.seed_layers:
                torch.manual_seed(options.base_seed + number)
            else:
                digest = hashlib.sha256(f"{self._seed} {number}".encode()).digest()
                torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            yield

    def keep(self, numbers: Sequence[int]) -> None:
        """Let all other layers go."""
        kept = {self.layer_list.layers[number].path for number in numbers}
        for number, layer in enumerate(self.layer_list.layers):
            if layer.path and layer.path not in kept:
                parent, _, leaf = layer.path.rpartition(".")
                place = self.get_submodule(parent)
                if leaf in children_of(place):
                    delattr(place, leaf)
                self.specs = (*self.specs[:number], None, *self.specs[number + 1 :])
        self.numbers = tuple(numbers)

    def chunk(self, numbers: Sequence[int]) -> nn.Module:
        """Some of these layers as a module of their own, under the names that they have here."""
        tied = with_children(self.tied_modules, children_of(self.tied_modules))
        found: Any = with_children(self, children_of(self) | {TIED: tied})
        found.keep(numbers)
        chunk: nn.Module = found
        return chunk

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "LayeredModule":
        """What `.to()`, `.cuda()` and their kin call: layers that are not built yet stay as they are."""
        for path in dict.fromkeys(layer.path for layer in self.layer_list.layers if layer.path):
            try:
                layer = self.get_submodule(path)
            except AttributeError:
                continue
            if not is_on_meta(layer):
                layer._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    # Running

    def forward(self, inputs: Any) -> Any:
        """Give the input to the first layer, its output to the next, and so on; a tuple is one input."""
        interval = self.activation_checkpoint_interval
        if not interval or not torch.is_grad_enabled():
            return self._run(self.numbers, inputs)
        for start in range(0, len(self.numbers), interval):
            numbers = self.numbers[start : start + interval]
            if self._is_checkpointed(numbers):
                inputs = self.options.activation_checkpoint_func(partial(self._run, numbers), inputs)
            else:
                inputs = self._run(numbers, inputs)
        return inputs

    def _run(self, numbers: Iterable[int], inputs: Any) -> Any:
        for number in numbers:
            inputs = self._layer(number)(inputs)
        return inputs

    def _layer(self, number: int) -> Callable[[Any], Any]:
        path, spec = self.layer_list.layers[number].path, self.specs[number]
        if not path:
            function: Callable[[Any], Any] = spec
            return function
        module: nn.Module = self.get_submodule(path) if "." in path else getattr(self, path)
        if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None:
            return partial(spec.forward_fn, module)
        return module

    def _is_checkpointed(self, numbers: Sequence[int]) -> bool:
        layers = [self.layer_list.layers[number] for number in numbers]
        if self.options.checkpointable_layers is not None:
            return all(layer.kind in self.options.checkpointable_layers for layer in layers)
        found = (self.get_submodule(layer.path) for layer in layers if layer.path)
        return any(True for module in found for _ in module.parameters())


def current_world() -> World:
    """Who this rank is among how many, whether or not they have met."""
    return World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else World.detect(environ())


def bounds_of(model: LayeredModule, parts: int) -> list[int]:
    """Where each of so many parts of a model's layers begins, and the end of the last one."""
    modules = (model.get_submodule(layer.path) if layer.path else None for layer in model.layer_list.layers)
    weights = [sum(p.numel() for p in m.parameters() if p.requires_grad) if m is not None else 0 for m in modules]
    return cut_layers(model.layer_list, weights, parts)


def cut_layers(layers: LayerList, weights: Sequence[float], parts: int) -> list[int]:
    """Where each of so many parts begins, by the partition method of the model."""
    if layers.partition.lower().startswith("type:"):
        return list(partition([layer.kind for layer in layers.layers], layers.partition, parts))
    return list(partition(layers.weights or weights, layers.partition, parts))


def is_on_meta(module: nn.Module) -> bool:
    """Whether a module has tensors without memory."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def _on_meta(spec: LayerSpec) -> nn.Module:
    with torch.device("meta"):
        built = spec.build()
    return built.to("meta")
