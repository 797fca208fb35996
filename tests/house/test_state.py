"""State of the process is in ambient.py only. Elsewhere a module has constants: tables marked Final, never written."""

import ast
from collections.abc import Iterable, Iterator

from house.tree import Module, made_up, modules

CONTAINERS = {
    *("dict", "list", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter", "ChainMap"),
    *("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "ContextVar", "local", "count", "SimpleNamespace"),
}
WRITERS = {
    *("append", "extend", "insert", "remove", "pop", "popitem", "clear", "sort", "reverse"),
    *("add", "discard", "update", "setdefault", "appendleft", "popleft", "set"),
}
DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)


def bindings(body: Iterable[ast.stmt]) -> Iterator[tuple[ast.stmt, str, ast.expr, bool]]:
    """Each name that a module binds by assignment: statement, name, value, whether it is Final."""
    for node in body:
        match node:
            case ast.If() | ast.Try() | ast.With():
                yield from bindings([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])
            case ast.Assign(targets=targets, value=value):
                yield from ((node, target.id, value, False) for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value):
                yield node, name, value, "Final" in ast.unparse(annotation)


def is_mutable(value: ast.expr) -> bool:
    """A container, a None to be filled in later, or something that only exists to change."""
    match value:
        case ast.Constant(value=None):
            return True
        case ast.Call(func=function):
            return ast.unparse(function).split(".")[-1].split("[")[0] in CONTAINERS
    return isinstance(value, DISPLAYS)


def written(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of what is changed through a plain name: `NAME[...] = `, `NAME.append()`, `NAME.x = `."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                places = targets
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                places = [target]
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in WRITERS:
                yield node.lineno, name
                continue
            case _:
                continue
        for place in places:
            if isinstance(place, ast.Subscript | ast.Attribute) and isinstance(place.value, ast.Name):
                yield node.lineno, place.value.id


def state(files: Iterable[Module]) -> list[str]:
    """Module-level state, as `comm/bad.py:3 GROUPS is mutable and not Final`."""
    found = []
    for module in files:
        for node in module.nodes:
            if isinstance(node, ast.Global):
                found.append(f"{module.name}:{node.lineno} global {', '.join(node.names)}")
        if module.name == "ambient.py":
            continue
        tables = set()
        for node, name, value, final in bindings(module.tree.body):
            if is_mutable(value) and not name.startswith("__"):
                tables.add(name)
                if not final:
                    found.append(f"{module.name}:{node.lineno} {name} is mutable and not Final")
        found += [
            f"{module.name}:{line} {name} is written" for line, name in sorted(written(module.tree)) if name in tables
        ]
    return found


def test_modules_hold_no_state():
    assert state(modules()) == []


def test_what_is_state(tmp_path):
    bad = """from typing import Final
CURRENT = None
GROUPS = {}
QUEUE: list[int] = deque()
TABLE: Final = {"a": 1}
FINE: Final = ["a"]
NUMBER = 3
__all__ = ["f"]
if NUMBER:
    LATE = []

def f():
    global NUMBER
    TABLE["b"] = 2
    TABLE.update(c=3)
    del TABLE["a"]
    local = {}
    local["a"] = FINE[0]
"""
    assert state(made_up(tmp_path, {"a.py": bad, "ambient.py": "X = {}\n"})) == [
        "a.py:13 global NUMBER",
        "a.py:2 CURRENT is mutable and not Final",
        "a.py:3 GROUPS is mutable and not Final",
        "a.py:4 QUEUE is mutable and not Final",
        "a.py:10 LATE is mutable and not Final",
        "a.py:14 TABLE is written",
        "a.py:15 TABLE is written",
        "a.py:16 TABLE is written",
    ]
