"""The public names: one list, the same for Python and for type checkers, and every one of them there."""

import ast
import subprocess
import sys
import tomllib
from importlib import import_module

import pytest

import mizzen
from house.tree import ROOT, SOURCE
from mizzen import errors

HOMES = mizzen._HOMES


def told_to_type_checkers():
    """name -> module, from the block that only type checkers read."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    told = {}
    for node in block.body:
        for alias in node.names:
            assert alias.asname == alias.name, f"{alias.name}: only 'import X as X' is a re-export to a type checker"
            told[alias.name] = f"mizzen.{alias.name}" if node.module == "mizzen" else node.module
    return told


def test_all_is_what_is_public():
    assert [*mizzen.__all__] == [*HOMES, "__version__"]
    assert dir(mizzen) == sorted(mizzen.__all__)
    assert [*HOMES] == sorted(HOMES)


def test_type_checkers_see_the_same_names():
    assert told_to_type_checkers() == HOMES


@pytest.mark.parametrize("name", HOMES)
def test_every_name_resolves(name):
    value = getattr(mizzen, name)
    home = import_module(HOMES[name])
    assert value is home if HOMES[name] == f"mizzen.{name}" else value is getattr(home, name)
    assert getattr(value, "__doc__", None), f"{name} is public and has no docstring"


def test_every_error_is_public():
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert kinds <= set(mizzen.__all__)


def test_an_unknown_name_is_an_attribute_error_that_python_can_mend():
    code = "import mizzen; mizzen.init_distribute"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=SOURCE.parent)
    assert "AttributeError: module 'mizzen' has no attribute 'init_distribute'" in ended.stderr
    assert "Did you mean: 'init_distributed'?" in ended.stderr


def test_the_version_is_the_one_of_the_distribution():
    assert mizzen.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
