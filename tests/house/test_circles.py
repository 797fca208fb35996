"""No file imports itself by way of others, and the engine does not know by what names ranks are cut or parts counted.

Imports for types alone count: a value that two files hand to each other belongs in a third.
"""

import ast
from collections.abc import Iterable, Iterator

from house.tree import Module, made_up, modules
from mizzen.config.layout import AXES, EXPERT_AXES

FIRST_ONLY = ("parts", "stores", "modules")


def arrows(files: Iterable[Module]) -> dict[str, set[str]]:
    """Each module with those of the package that it imports, by dotted name."""
    names = {"mizzen." + module.name.removesuffix(".py").replace("/", "."): module for module in files}
    names = {name.removesuffix(".__init__"): module for name, module in names.items()}
    found = {}
    for name, module in names.items():
        found[name] = {target for target in _targets(module, names) if target != name}
    return found


def _targets(module: Module, names: Iterable[str]) -> Iterator[str]:
    """What a file imports of the package; a module out of a folder is no import of the folder."""
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from inside.intersection(names) or {node.module}.intersection(names)


def circles(found: dict[str, set[str]]) -> list[list[str]]:
    """Modules that reach each other, as sorted lists."""
    reached = {name: _reached(found, name) for name in found}
    together = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in found}
    return [list(names) for names in sorted(together) if len(names) > 1]


def _reached(found: dict[str, set[str]], name: str) -> set[str]:
    seen, rest = set(), [name]
    while rest:
        rest += (new := found[rest.pop()] - seen)
        seen |= new
    return seen


def named_axes(files: Iterable[Module]) -> Iterator[str]:
    """Places where a file of the engine has an axis as a text."""
    for module in files:
        if module.unit == "engine":
            for node in module.nodes:
                if isinstance(node, ast.Constant) and node.value in (*AXES, *EXPERT_AXES):
                    yield f"{module.name}:{node.lineno} {node.value!r}"


def firsts(files: Iterable[Module]) -> Iterator[str]:
    """Places where a file of the engine takes the first of several parts for all of them."""
    for module in files:
        if module.unit == "engine":
            for node in module.nodes:
                if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == 0:
                    whose = ast.unparse(node.value).rpartition(".")[2].lstrip("_")
                    if whose in FIRST_ONLY:
                        yield f"{module.name}:{node.lineno} {ast.unparse(node)}"


def test_no_circles():
    assert circles(arrows(modules())) == []


def test_the_engine_names_no_axis():
    assert list(named_axes(modules())) == []


def test_the_engine_looks_at_all_parts():
    assert list(firsts(modules())) == []


def test_what_these_tests_find(tmp_path):
    files = made_up(
        tmp_path,
        {
            "engine/a.py": "from mizzen.engine import b\nx = parts[0].module, 'tp'\n",
            "engine/b.py": "if TYPE_CHECKING:\n    from mizzen.engine.c import C\ny = self.stores[0]\n",
            "engine/c.py": "from mizzen.engine.a import x\nz = self.rows[0]\n",
            "engine/d.py": "from mizzen.engine.c import z\n",
        },
    )
    assert circles(arrows(files)) == [["mizzen.engine.a", "mizzen.engine.b", "mizzen.engine.c"]]
    assert list(named_axes(files)) == ["engine/a.py:2 'tp'"]
    assert list(firsts(files)) == ["engine/a.py:2 parts[0]", "engine/b.py:3 self.stores[0]"]
