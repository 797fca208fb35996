"""The repeated units of a model, found in its Sketch: what is sharded, recomputed, compiled and cut one by one.

Finding them is all that happens here. What a unit is used for, and whether it is worth it, is decided by a plan.
"""

import difflib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from mizzen.errors import PlanError
from mizzen.model.sketch import CONTAINERS, ParameterSketch, Sketch, ancestors_of, count_of, parent_of
from mizzen.wording import and_more

Source = Literal["choice", "hint", "structure"]
Kind = str | int
"""What makes modules the same sort of thing: the class, or the structure of a plain list or sequence of modules."""


@dataclass(frozen=True, slots=True)
class Block:
    """One unit. A module that is reached by several paths is one unit under the first of them."""

    path: str
    kind: str
    """The name of its class."""
    source: Source
    """Who said so: the user, the model's own hint, or repetition."""
    parameters: tuple[str, ...]
    """Its parameters, except those that are tied to something outside."""
    numel: int
    aliases: tuple[str, ...] = ()
    """Other paths to the same module."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The units in the order of definition, and what belongs to none: embeddings, the head, tied weights."""

    units: tuple[Block, ...]
    rest: tuple[str, ...]
    rest_numel: int

    @classmethod
    def of(cls, sketch: Sketch, choice: Sequence[str] = ()) -> "Blocks":
        """Find the units: those of `choice` (class names, paths, or ends of paths), else by hint and by repetition.

        Only the outermost match counts: nothing inside a unit is a unit.
        """
        tree, found = _Tree(sketch), dict[str, Source]()
        if choice:
            found.update((path, "choice") for path in _chosen(tree, choice))
        else:
            found.update((path, "hint") for path in _hinted(tree, sketch.hints))
            found.update((path, "structure") for path in _repeated(tree, tuple(found)))
        return _share(tree, sketch.parameters, found)

    @property
    def numel(self) -> int:
        """How many parameters are in units."""
        return sum(unit.numel for unit in self.units)

    def __str__(self) -> str:
        total = count_of(self.numel + self.rest_numel)
        lines = [f"{len(self.units)} blocks, {count_of(self.numel)} of {total} parameters"]
        for (kind, numel, source), group in groupby(self.units, lambda unit: (unit.kind, unit.numel, unit.source)):
            alike = list(group)
            paths = alike[0].path if len(alike) == 1 else f"{alike[0].path} ... {alike[-1].path}"
            lines.append(f"  {len(alike)} x {kind} of {count_of(numel)} (by {source}): {paths}")
        return "\n".join([*lines, f"  rest of {count_of(self.rest_numel)}: {and_more(self.rest, 4) or 'nothing'}"])


class _Tree:
    """The module tree with what every search asks for. A module reached twice is in it once, at its first path."""

    def __init__(self, sketch: Sketch) -> None:
        self.modules = {module.path: module for module in sketch.modules if module.same_as is None}
        self.first_path = {module.path: module.same_as or module.path for module in sketch.modules}
        self.aliases: dict[str, list[str]] = {path: [] for path in self.modules}
        self.children: dict[str, list[str]] = {path: [] for path in self.first_path}
        for path, first in self.first_path.items():
            if path != first:
                self.aliases[first].append(path)
            if path:
                self.children[parent_of(path)].append(path)
        self.structures: dict[str, int] = {}
        """Equal numbers for equal classes, parameter names and shapes, all the way down."""
        self.bare: set[str] = set()
        """The modules without any parameter inside."""
        self._compare(sketch)

    def _compare(self, sketch: Sketch) -> None:
        shapes = {name: parameter.shape for name, parameter in sketch.by_name().items()}
        numbers: dict[object, int] = {}
        # Children come after their parents, so backwards every child is known when its parent asks.
        for module in reversed(sketch.modules):
            children = self.children[module.path]
            own = tuple((name.rpartition(".")[2], shapes[name]) for name in module.parameters)
            structure = (module.kind, own, tuple(self.structures[child] for child in children))
            self.structures[module.path] = numbers.setdefault(structure, len(numbers))
            if not own and self.bare.issuperset(children):
                self.bare.add(module.path)

    def kind(self, path: str) -> Kind:
        """What the module is, for the purpose of finding its like."""
        module = self.modules[path]
        return self.structures[path] if module.kind in CONTAINERS else module.kind

    def lists_outside(self, units: set[str]) -> Iterator[list[str]]:
        """For every list in none of the units, from the outside in, its items that hold parameters.

        The set may grow between two lists: what is inside of a new unit is then left out.
        """
        for path, module in self.modules.items():
            if module.is_container and units.isdisjoint((path, *ancestors_of(path))):
                yield [self.first_path[child] for child in self.children[path] if child not in self.bare]

    def outermost(self, paths: Iterable[str]) -> list[str]:
        """Those that lie in none of the others, in order."""
        wanted = set(paths)
        return [path for path in self.modules if path in wanted and wanted.isdisjoint(ancestors_of(path))]

    def unit_around(self, name: str, units: Container[str]) -> str | None:
        """The innermost of the units that a name lies in, under whatever path."""
        around = (self.first_path[path] for path in ancestors_of(name) if path in self.first_path)
        return next((path for path in around if path in units), None)


def _chosen(tree: _Tree, choice: Sequence[str]) -> list[str]:
    """The modules that a user names by class, by path, or by the end of a path."""
    found: set[str] = set()
    for entry in choice:
        matches = {
            path
            for path, module in tree.modules.items()
            for name in (path, *tree.aliases[path])
            if module.kind == entry or name == entry or name.endswith(f".{entry}")
        }
        if not matches:
            raise PlanError(f"'{entry}' is neither a class nor a module of this model{_nearest(tree, entry)}")
        found |= matches
    return tree.outermost(found)


def _nearest(tree: _Tree, entry: str) -> str:
    names = sorted({module.kind for module in tree.modules.values()} | set(tree.modules))
    close = difflib.get_close_matches(entry, names, n=3)
    return f"; did you mean {' or '.join(repr(name) for name in close)}?" if close else ""


def _hinted(tree: _Tree, hints: Sequence[str]) -> list[str]:
    """The modules of hinted classes. One that stands alone, as the embeddings of some models do, repeats nothing."""
    matches = [path for path, module in tree.modules.items() if module.kind in hints and path not in tree.bare]
    counts = Counter(tree.modules[path].kind for path in matches)
    listed = {item for items in tree.lists_outside(set()) for item in items}
    return tree.outermost(path for path in matches if path in listed or counts[tree.modules[path].kind] > 1)


def _repeated(tree: _Tree, hinted: Sequence[str]) -> list[str]:
    """The items of lists that are of a repeated kind, neither inside of a hinted unit nor around one.

    A kind repeats when one list has two items of the same structure. Then all listed modules of this kind are units,
    whatever their shapes: the first layers of a mixture of experts are dense, and widths grow along a U-net.
    """
    around = {outer for path in hinted for outer in (path, *ancestors_of(path))}
    kinds: set[Kind] = set()
    found = set(hinted)
    for items in tree.lists_outside(found):
        counts = Counter(tree.structures[item] for item in items)
        kinds |= {tree.kind(item) for item in items if counts[tree.structures[item]] > 1 and item not in around}
        found |= {item for item in items if tree.kind(item) in kinds} - around
    listed = (item for items in tree.lists_outside(set(hinted)) for item in items)
    return tree.outermost(item for item in listed if tree.kind(item) in kinds and item not in around)


def _share(tree: _Tree, parameters: Sequence[ParameterSketch], found: dict[str, Source]) -> Blocks:
    """Give each parameter to the unit that all of its names lie in, or to the rest."""
    owned: dict[str, list[ParameterSketch]] = {path: [] for path in tree.modules if path in found}
    rest: list[ParameterSketch] = []
    for parameter in parameters:
        around = {tree.unit_around(name, owned) for name in parameter.names}
        unit = around.pop() if len(around) == 1 else None
        (rest if unit is None else owned[unit]).append(parameter)
    return Blocks(
        tuple(_block(tree, path, found[path], held) for path, held in owned.items()),
        tuple(parameter.name for parameter in rest),
        sum(parameter.numel for parameter in rest),
    )


def _block(tree: _Tree, path: str, source: Source, held: Sequence[ParameterSketch]) -> Block:
    names, numel = tuple(parameter.name for parameter in held), sum(parameter.numel for parameter in held)
    return Block(path, tree.modules[path].kind, source, names, numel, tuple(tree.aliases[path]))
