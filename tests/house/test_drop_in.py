"""The drop-in is a roof: mizzen never imports it, and it is as small and plain as the rest."""

import ast

import pytest

from house.test_layers import imports
from house.test_sizes import FILE_LINES
from house.tree import ROOT, modules

ROOF = modules(ROOT / "compat" / "deepspeed")


def test_mizzen_does_not_know_it():
    found = [f"{module.name}:{line}" for module in modules() for line, name in imports(module) if name == "deepspeed"]
    found += [m.name for m in modules() for _, name in imports(m) if name.startswith(("deepspeed.", "mizzen.drop_in"))]
    assert found == []


def test_only_the_launcher_and_the_commands_know_its_path():
    knowing = {module.unit for module in modules() if "drop_in" in module.text}
    assert knowing == {"cli", "launcher"}


@pytest.mark.parametrize("module", ROOF, ids=lambda module: module.name)
def test_a_file_of_it(module):
    assert ast.get_docstring(module.tree)
    assert len(module.text.splitlines()) <= FILE_LINES
    for line, name in imports(module):
        assert not name.startswith("."), f"{module.name}:{line} imports relatively"


def test_the_table_imports_nothing_but_its_rows():
    names = {name for module in ROOF if module.name.startswith("table/") for _, name in imports(module)}
    assert {name for name in names if not name.startswith("deepspeed.table")} == {"typing"}
