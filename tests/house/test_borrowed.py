"""Private parts of torch are borrowed in one file each, and docs/borrowed.md lists every one of them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from house.tree import ROOT, modules

LIST = ROOT / "docs" / "borrowed.md"
ATTRIBUTES = {
    "_buffers",
    "_flatten",
    "_foreach_norm",
    "_modules",
    "_non_persistent_buffers_set",
    "_optimizer_step_post_hooks",
    "_optimizer_step_pre_hooks",
    "_parameters",
    "_source_rank",
    "_unflatten",
    "_version",
}
"""Private attributes of torch's objects; names of our own start with an underscore as well, so these are listed."""


def borrowed(tree: ast.Module) -> Iterator[str]:
    """The private names of torch that a file uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))
            yield from (part for part in (node.module or "").split(".") if part.startswith("_"))
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in ATTRIBUTES
            or isinstance(node, ast.Attribute)
            and re.fullmatch(r"torch(\.\w+)*\._[a-z]\w*", ast.unparse(node))
        ):
            yield node.attr


def found() -> dict[str, set[str]]:
    places: dict[str, set[str]] = {}
    for module in modules():
        for name in borrowed(module.tree):
            places.setdefault(name, set()).add(module.name)
    return places


def listed() -> dict[str, str]:
    rows = [line.split("|") for line in LIST.read_text().splitlines() if line.startswith("| `")]
    return {row[1].strip().strip("`").rpartition(".")[2]: row[2].strip().strip("`") for row in rows}


def test_every_borrowing_is_listed_with_its_file():
    assert {name: sorted(files) for name, files in found().items()} == {name: [file] for name, file in listed().items()}


def test_what_counts_as_borrowing():
    text = "import torch\nfrom torch.nn import _reduction\nfrom torch._dynamo import config\ntorch._foreach_norm(x)\n"
    assert sorted(borrowed(ast.parse(text))) == ["_dynamo", "_foreach_norm", "_reduction"]
    assert list(borrowed(ast.parse("self._own\ntorch.__version__\n"))) == []


def test_the_list_exists():
    assert Path(LIST).is_file()
