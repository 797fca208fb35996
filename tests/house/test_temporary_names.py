"""Files that are not finished have names of their own: `files.temporary` alone makes them, and never the same twice."""

import ast
import re
from collections.abc import Iterable

from house.tree import ROOT, Module, made_up, modules

HOME = "files.py"
UNFINISHED = re.compile(r"\.(tmp|temp|new|part|partial|swp|bak)(?![A-Za-z0-9_])")
MAKERS = frozenset({"with_name", "with_suffix", "with_stem", "mktemp"})
"""Ways to make a name beside a file. What `tempfile` opens itself is unique already."""


def offences(found: Iterable[Module]) -> list[str]:
    return [
        f"{module.name}:{node.lineno} {what}"
        for module in found
        if module.name != HOME
        for node, what in _names(module.nodes)
    ]


def _names(nodes: Iterable[ast.AST]) -> Iterable[tuple[ast.expr, str]]:
    texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            if UNFINISHED.search(node.value):
                yield node, f"makes a name out of {node.value!r}"
        elif isinstance(node, ast.Attribute) and node.attr in MAKERS:
            yield node, f"makes a name by {node.attr}"


def test_names_of_unfinished_files_are_made_in_one_place():
    assert offences(modules()) == []
    assert offences(modules(ROOT / "compat" / "deepspeed")) == []


def test_the_check_sees_such_names(tmp_path):
    text = 'a = path.with_name("x")\nb = f"{path}.tmp"\nc = path + ".new"\nd = "zero.stage is 1"\n'
    found = offences(made_up(tmp_path, {"a.py": text}))
    assert sorted(each.split()[0] for each in found) == ["a.py:1", "a.py:2", "a.py:3"]
