"""Private parts of torch are borrowed in one file each, and docs/borrowed.md lists every one of them."""

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from house.tree import ROOT, modules

LIST = ROOT / "docs" / "borrowed.md"
SHARED = {"_base", "_buffers", "_flatten", "_modules", "_parameters", "_unflatten", "_version"}
"""Private names of torch's objects that something of ours has too."""
DOCUMENTED = {"_C", "_asdict", "_current_frames", "_exit", "_getframe"}
"""A module of torch with public names in it, and functions that Python documents."""


def own(tree: ast.Module) -> Iterator[str]:
    """The names that a file defines: functions, classes, variables, fields, and attributes that it sets on itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else []


def borrowed(tree: ast.Module, known: Collection[str]) -> Iterator[str]:
    """The private names that a file reads or sets on what is not ours: any that nothing of ours defines."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != "mizzen":
            names = [*(alias.name for alias in node.names), *(node.module or "").split(".")]
        elif isinstance(node, ast.Attribute):
            names = [node.attr] if node.attr in SHARED or node.attr not in known else []
        yield from (name for name in names if re.match("_[^_]", name) and name not in DOCUMENTED)


@cache
def found() -> dict[str, set[str]]:
    places: dict[str, set[str]] = {}
    known = {name for module in modules() for name in own(module.tree)}
    for module in modules():
        for name in borrowed(module.tree, known):
            places.setdefault(name, set()).add(module.name)
    return places


def listed() -> dict[str, list[str]]:
    rows = [line.split("|") for line in LIST.read_text().splitlines() if line.startswith("| `")]
    return {row[1].strip().strip("`").rpartition(".")[2]: re.findall("`([^`]+)`", row[2]) for row in rows}


def test_every_borrowing_is_listed_with_its_file():
    assert {name: sorted(files) for name, files in found().items()} == listed()


def test_what_counts_as_borrowing():
    text = "from torch.nn import _reduction\nfrom torch._dynamo import config\ntorch._foreach_norm(x)\nx.state._ours\n"
    assert sorted(borrowed(ast.parse(text), {"_ours"})) == ["_dynamo", "_foreach_norm", "_reduction"]
    assert list(borrowed(ast.parse("group._all_gather_result = None\n"), ())) == ["_all_gather_result"]
    assert list(borrowed(ast.parse("self._own\ntorch.__version__\nos._exit(1)\n"), {"_own"})) == []


def test_nothing_of_fsdp_is_borrowed():
    assert not [
        name for name in found() if "fsdp" in name.lower() or "shard" in name.lower() and name != "_StridedShard"
    ]


def test_the_list_exists():
    assert Path(LIST).is_file()
