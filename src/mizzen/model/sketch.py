"""What a model is made of: names, shapes, dtypes and ties as plain values, so that a plan needs no tensor.

Nothing here imports torch and no tensor is kept. A Sketch is read from a module (on the meta device too), from the
names and shapes of a checkpoint, or written by hand. Where its tensors lie and who shards them is not known here.
"""

import hashlib
import inspect
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from mizzen.ambient import AMBIENT
from mizzen.config.layout import Layout
from mizzen.errors import PlanError, UsageError
from mizzen.model.flow import Flow, layer_kind
from mizzen.model.head import HeadSketch, head_of
from mizzen.model.home import Home, ParameterSplit, split_of
from mizzen.model.layer_list import LayerList

if TYPE_CHECKING:
    from torch import Tensor, nn

CONTAINERS: Final = ("ModuleList", "ModuleDict", "Sequential")
EMBEDDINGS: Final = ("Embedding", "EmbeddingBag")
ROTARY: Final = "apply_rotary_pos_emb"
"""The function by which models with rotary embeddings turn queries and keys; each file of models has its own."""


def bytes_per_element(dtype: str) -> int:
    """The size of an element of a dtype named as torch names it, without the `torch.`; sub-byte types take a byte."""
    if dtype == "bool":
        return 1
    if (bits := re.search(r"\d+", dtype)) is None:
        raise UsageError(f"'{dtype}' is not the name of a dtype: give one like 'float32' or 'bfloat16'")
    return max(1, int(bits.group()) // 8)


@dataclass(frozen=True, slots=True)
class ParameterSketch:
    """One parameter, under the name that `named_parameters()` gives it."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    requires_grad: bool = True
    aliases: tuple[str, ...] = ()
    """Its other names: it is tied to other modules, or its module is reached by several paths."""
    kind: str = ""
    """The class of the module that holds it."""
    is_embedding: bool = False
    group: int | None = 0
    """The optimizer group that trains it; None when none does."""
    is_external: bool = False
    """Whether a module that does not hold it has registered that it uses it."""
    is_whole: bool = False
    """Whether the update rule of that group needs it whole."""
    is_joined: bool = False
    """Whether that rule puts it together by itself, where it is cut over tensor-parallel ranks."""
    split: ParameterSplit | None = None
    """How it comes cut already, where its own layer has cut it."""
    home: Home = Home()
    """Where it lives. The shape here is that of the whole, wherever that is cut."""

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer trains it."""
        return self.requires_grad and self.group is not None

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return self.numel * bytes_per_element(self.dtype)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a state dict has for it."""
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class BufferSketch:
    """One buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    persistent: bool = True
    """Whether a state dict has it."""
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return math.prod(self.shape) * bytes_per_element(self.dtype)


@dataclass(frozen=True, slots=True)
class ModuleSketch:
    """One module of the tree; the root has the empty path."""

    path: str
    kind: str
    """The name of its class."""
    parameters: tuple[str, ...] = ()
    """The full names of its own parameters, as seen from here."""
    is_container: bool = False
    """Whether it is a list, a dict or a sequence of modules."""
    same_as: str | None = None
    """The path under which the same module object was met before."""
    is_rotary: bool = False
    """Whether its forward calls the `ROTARY` function of its file."""
    is_leaf: bool = False
    """Whether a user has pinned it as one unit of gathering."""
    type: "type[nn.Module] | None" = field(default=None, repr=False, compare=False)
    """Its class, for those who have to know what it computes; None where no module was read."""
    layer: str = field(default="", repr=False, compare=False)
    """What it computes with its weight: linear, transposed or embedding, or none of these."""
    sizes: tuple[tuple[str, int], ...] = field(default=(), repr=False, compare=False)
    """The whole numbers that it has as attributes, such as how many heads."""
    own: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    """The names of what the module itself has, beside its class: a forward that somebody has given it, say."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A model without its tensors. Two models with equal sketches are planned alike."""

    parameters: tuple[ParameterSketch, ...]
    """Each once, in the order of `named_parameters()`."""
    buffers: tuple[BufferSketch, ...] = ()
    modules: tuple[ModuleSketch, ...] = ()
    """Parents before children, in the order of definition."""
    hints: tuple[str, ...] = ()
    """Classes that the model itself says should not be taken apart."""
    head: HeadSketch | None = None
    """The layer that makes logits, in a model that computes its own loss from labels."""
    split_plan: tuple[tuple[str, str], ...] = ()
    """How the model itself says that its layers are split over ranks: patterns of paths, and transformers' styles."""
    flow: Flow | None = field(default=None, repr=False, compare=False)
    """Which layers read what others give, where somebody has looked (`with_flow`)."""
    layer_list: LayerList | None = None
    """The layers of a model that is written as a list of them."""
    seconds: tuple[tuple[str, float], ...] = ()
    """What modules take for a micro-batch, by their paths, where that was measured."""

    @classmethod
    def of(cls, module: "nn.Module") -> "Sketch":
        """Read a module. No tensor is copied or kept, and none needs to have storage."""
        return _SketchReader().read(module)

    def with_groups(self, groups: Mapping[str, int], whole: Collection[int] = (), *, joins: bool = False) -> "Sketch":
        """This model with its parameters in these optimizer groups; one that is in none is not trained.

        The update rules of the groups `whole` need whole parameters; with `joins` they put cut ones together.
        """
        parameters = (
            replace(p, group=(group := groups.get(p.name)), is_whole=group in whole, is_joined=joins)
            for p in self.parameters
        )
        return replace(self, parameters=tuple(parameters))

    def unsplit(self, ranks: int) -> "Sketch":
        """This model with the shapes of whole parameters, where it was read from one that comes split."""
        for parameter in self.parameters:
            _check_split(parameter, ranks)
        if ranks == 1:
            return replace(self, parameters=tuple(replace(p, split=None) for p in self.parameters))
        return replace(self, parameters=tuple(_unsplit(p, ranks) for p in self.parameters))

    def with_flow(self, flow: Flow) -> "Sketch":
        """This model, and what is known of the way that activations take through it."""
        return replace(self, flow=flow)

    def with_home(self, home: Home) -> "Sketch":
        """This model with all parameters in one home."""
        return replace(self, parameters=tuple(replace(p, home=home) for p in self.parameters))

    def local(self, layout: Layout, rank: int) -> "Sketch":
        """This model as a rank has it: with the shapes of what it holds, and without what is not there."""
        here = self.having({p.name for p in self.parameters if p.home.is_at(layout, rank)})
        parameters = (
            p if p.home.is_whole else replace(p, shape=p.home.local_shape(p.shape, layout, rank))
            for p in here.parameters
        )
        return replace(here, parameters=tuple(parameters))

    def having(self, names: Collection[str]) -> "Sketch":
        """This model with these parameters alone."""
        if len(names) == len(self.parameters):
            return self
        kept = tuple(p for p in self.parameters if p.name in names)
        known = {name for p in kept for name in p.names}
        modules = (replace(m, parameters=tuple(name for name in m.parameters if name in known)) for m in self.modules)
        return replace(self, parameters=kept, modules=tuple(modules))

    def frozen(self) -> "Sketch":
        """This model with nothing to train."""
        return replace(self, parameters=tuple(replace(p, requires_grad=False) for p in self.parameters))

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of the trained parameters, by optimizer group."""
        homes = [(parameter.name, parameter.group) for parameter in self.parameters if parameter.is_trained]
        count = 1 + max((group for _, group in homes if group is not None), default=-1)
        return tuple(tuple(name for name, group in homes if group == number) for number in range(count))

    @classmethod
    def of_shapes(
        cls, shapes: Mapping[str, tuple[int, ...]], *, dtype: str = "float32", kinds: Mapping[str, str] | None = None
    ) -> "Sketch":
        """A sketch from names and shapes alone, as a checkpoint's index or a test has them; `kinds` names classes.

        A module without a class given is a `ModuleList` if its children are numbered and otherwise a `Module`.
        """
        own: dict[str, list[str]] = {"": []}
        for name in shapes:
            for path in reversed(list(ancestors_of(name))):
                own.setdefault(path, [])
            own[parent_of(name)].append(name)
        numbered = {parent_of(path) for path in own if path.rpartition(".")[2].isdigit()}
        classes = {path: "ModuleList" if path in numbered else "Module" for path in own} | dict(kinds or {})
        parameters = (
            ParameterSketch(
                name, tuple(shape), dtype, kind=(kind := classes[parent_of(name)]), is_embedding=kind in EMBEDDINGS
            )
            for name, shape in shapes.items()
        )
        modules = (
            ModuleSketch(path, classes[path], tuple(names), is_container=classes[path] in CONTAINERS)
            for path, names in own.items()
        )
        return cls(tuple(parameters), modules=tuple(modules))

    @property
    def numel(self) -> int:
        """The number of parameters in the everyday sense: each element once."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def trainable_numel(self) -> int:
        """How many of them are trained."""
        return sum(parameter.numel for parameter in self.parameters if parameter.requires_grad)

    @property
    def nbytes(self) -> int:
        """The memory of all parameters in their own dtypes; buffers are not counted."""
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def numel_by_dtype(self) -> dict[str, int]:
        """The number of elements of each dtype, largest first."""
        totals: dict[str, int] = {}
        for parameter in self.parameters:
            totals[parameter.dtype] = totals.get(parameter.dtype, 0) + parameter.numel
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def by_name(self) -> dict[str, ParameterSketch]:
        """Every parameter under every one of its names."""
        return {name: parameter for parameter in self.parameters for name in parameter.names}

    def fingerprint(self) -> str:
        """A hash of names, shapes, dtypes and ties, the same in every process, whatever the order of definition."""
        held = sorted((sorted(each.names), each.shape, each.dtype) for each in self.parameters)
        kept = sorted(
            (sorted((each.name, *each.aliases)), each.shape, each.dtype) for each in self.buffers if each.persistent
        )
        return hashlib.sha256(json.dumps([held, kept]).encode()).hexdigest()

    def __str__(self) -> str:
        kind = self.modules[0].kind if self.modules else "model"
        dtypes = ", ".join(f"{count_of(numel)} {dtype}" for dtype, numel in self.numel_by_dtype.items())
        lines = [f"{kind}: {count_of(self.numel)} parameters in {len(self.parameters)} tensors ({dtypes or 'none'})"]
        if self.trainable_numel != self.numel:
            lines.append(f"  trainable: {count_of(self.trainable_numel)}")
        if shared := [each for each in self.parameters if each.aliases]:
            lines.append(f"  of several names: {len(shared)}, such as {' = '.join(shared[0].names)}")
        if self.buffers:
            lines.append(f"  buffers: {len(self.buffers)}, {count_of(sum(each.nbytes for each in self.buffers))}B")
        return "\n".join(lines)


Drafts = tuple[Sketch, ...]
"""A model while it is planned: one sketch for each piece of it, in their order. One, until something cuts it."""


def joined(drafts: Drafts) -> Sketch:
    """All pieces of a model as one sketch again."""
    if len(drafts) == 1:
        return drafts[0]
    parameters = {p.name: p for draft in reversed(drafts) for p in draft.parameters}
    order = dict.fromkeys(p.name for draft in drafts for p in draft.parameters)
    held: dict[str, dict[str, None]] = {}
    for module in (module for draft in drafts for module in draft.modules):
        held.setdefault(module.path, {}).update(dict.fromkeys(module.parameters))
    return Sketch(
        tuple(parameters[name] for name in order),
        tuple({buffer.name: buffer for draft in drafts for buffer in draft.buffers}.values()),
        tuple(replace(module, parameters=tuple(held[module.path])) for module in drafts[0].modules),
        tuple(dict.fromkeys(hint for draft in drafts for hint in draft.hints)),
        next((draft.head for draft in drafts if draft.head is not None), None),
        drafts[0].split_plan,
        drafts[0].flow,
        drafts[0].layer_list,
        drafts[0].seconds,
    )


def parent_of(name: str) -> str:
    """The path of the module that holds a parameter, a buffer or a module of this name."""
    return name.rpartition(".")[0]


def ancestors_of(name: str) -> Iterator[str]:
    """The paths of the modules around a name, from the nearest out to the root."""
    while name:
        name = parent_of(name)
        yield name


def count_of(number: int) -> str:
    """A count in at most four digits: 950, 1.5k, 124.4M, 6.74G."""
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return str(number)


@dataclass(slots=True)
class _Found:
    """A parameter or buffer while the tree is being walked: its first name, then all others."""

    name: str
    tensor: "Tensor"
    owner: "nn.Module"
    aliases: list[str] = field(default_factory=list)


class _SketchReader:
    """One walk over a module tree. Tensors and modules are told apart by identity, as torch does."""

    def __init__(self) -> None:
        self.paths: dict[int, str] = {}
        self.parameters: dict[int, _Found] = {}
        self.buffers: dict[int, _Found] = {}
        self.modules: list[ModuleSketch] = []
        self.hints: dict[str, None] = {}
        self.head: HeadSketch | None = None

    def read(self, root: "nn.Module") -> Sketch:
        for path, module in root.named_modules(remove_duplicate=False):
            self._visit(path, module)
        return Sketch(
            tuple(_parameter(found) for found in self.parameters.values()),
            tuple(_buffer(found) for found in self.buffers.values()),
            tuple(self.modules),
            tuple(self.hints),
            self.head,
            _split_plan(root),
            layer_list=vars(root).get("layer_list"),
        )

    def _visit(self, path: str, module: "nn.Module") -> None:
        first = self.paths.setdefault(id(module), path)
        own = list(module.named_parameters(path, recurse=False, remove_duplicate=False))
        for name, parameter in own:
            _note(self.parameters, name, parameter, module)
        for name, buffer in module.named_buffers(path, recurse=False, remove_duplicate=False):
            _note(self.buffers, name, buffer, module)
        names = tuple(name for name, _ in own)
        same_as = first if first != path else None
        self.modules.append(
            ModuleSketch(
                path,
                type(module).__name__,
                names,
                _is_a(module, CONTAINERS) or isinstance(vars(module).get("layer_list"), LayerList),
                same_as,
                is_rotary=_is_rotary(module),
                is_leaf=AMBIENT.leaves.get(module) is not None,
                type=type(module),
                layer=layer_kind(module),
                sizes=tuple((name, value) for name, value in vars(module).items() if type(value) is int),
                own=frozenset(vars(module)),
            )
        )
        self.head = self.head or head_of(path, module)
        self.hints |= dict.fromkeys(_hints(module))


def _check_split(parameter: ParameterSketch, ranks: int) -> None:
    """Refuse a part that is none of so many ranks, where its layer says how large the whole is."""
    split, shape = parameter.split, parameter.shape
    if split is None or split.size is None or split.dim is None or split.dim >= len(shape):
        return
    fitting = {sum(parts) for parts in zip(*split.parts(split.size, ranks), strict=True)}
    if shape[split.dim] not in fitting:
        raise PlanError(
            f"'{parameter.name}' has {shape[split.dim]} of {split.size} in dimension {split.dim}, which is not the "
            f"part of one of {ranks} tensor-parallel ranks ({', '.join(map(str, sorted(fitting)))}): its layer was "
            "made for another number of them. Call mizzen.tensor.initialize_model_parallel() before the model is "
            "built, and give what it returns to initialize(mpu=), or set tensor_parallel_size"
        )


def _unsplit(parameter: ParameterSketch, ranks: int) -> ParameterSketch:
    split, shape = parameter.split, parameter.shape
    if split is None or split.dim is None or not 0 <= split.dim < len(shape):
        return parameter
    size = shape[split.dim] * ranks if split.size is None else split.size
    whole = (*shape[: split.dim], size, *shape[split.dim + 1 :])
    return replace(parameter, shape=whole)


def _note(seen: dict[int, _Found], name: str, tensor: "Tensor", module: "nn.Module") -> None:
    found = seen.setdefault(id(tensor), _Found(name, tensor, module))
    if found.name != name:
        found.aliases.append(name)


def _parameter(found: _Found) -> ParameterSketch:
    return ParameterSketch(
        found.name,
        _shape(found),
        _dtype(found.tensor),
        found.tensor.requires_grad,
        tuple(found.aliases),
        type(found.owner).__name__,
        _is_a(found.owner, EMBEDDINGS),
        is_external=AMBIENT.externals.get(found.tensor) is not None,
        split=split_of(found.tensor),
    )


def _buffer(found: _Found) -> BufferSketch:
    # torch has no public way to ask this of a module without building a whole state dict (docs/borrowed.md).
    persistent = found.name.rpartition(".")[2] not in found.owner._non_persistent_buffers_set
    return BufferSketch(found.name, _shape(found), _dtype(found.tensor), persistent, tuple(found.aliases))


def _shape(found: _Found) -> tuple[int, ...]:
    if _is_a(found.tensor, ("UninitializedTensorMixin",)):
        kind = type(found.owner).__name__
        raise UsageError(f"{found.name} has no shape yet: run the model once, so that its {kind} learns its input size")
    return tuple(found.tensor.shape)


def _dtype(tensor: "Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_a(instance: object, names: Iterable[str]) -> bool:
    """isinstance for classes of torch, by name, so that this file does not import it."""
    return not {base.__name__ for base in type(instance).__mro__}.isdisjoint(names)


def _hints(module: "nn.Module") -> tuple[str, ...]:
    # Read statically: wrappers forward unknown attributes to the model inside, which is visited anyway.
    hint: Any = inspect.getattr_static(module, "_no_split_modules", None)
    return tuple(sorted(hint)) if isinstance(hint, list | tuple | set | frozenset) else ()


def _split_plan(module: "nn.Module") -> tuple[tuple[str, str], ...]:
    """The plan of a model of transformers, which is a dict from patterns to styles."""
    plan: Any = module.tp_plan if isinstance(inspect.getattr_static(module, "tp_plan", None), property) else None
    return tuple((str(path), str(style)) for path, style in plan.items()) if isinstance(plan, dict) else ()


def _is_rotary(module: "nn.Module") -> bool:
    forward = type(module).forward
    return inspect.isfunction(forward) and ROTARY in forward.__code__.co_names
