"""The environment is read in environment.py only, and written nowhere."""

import ast
from collections.abc import Iterable

from house.tree import Module, made_up, modules

NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def uses(files: Iterable[Module]) -> list[str]:
    """Every use of the process's environment, as `comm/bad.py:3 os.environ`."""
    found = []
    for module in files:
        for node in module.nodes:
            match node:
                case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in NAMES:
                    found.append(f"{module.name}:{node.lineno} os.{name}")
                case ast.ImportFrom(module="os", names=names):
                    found += [f"{module.name}:{node.lineno} os.{alias.name}" for alias in names if alias.name in NAMES]
    return found


def test_only_one_file_reads_the_environment():
    assert [use for use in uses(modules()) if not use.startswith("environment.py:")] == []


def test_nothing_writes_the_environment(tmp_path):
    assert {use.split()[1] for use in uses(modules())} == {"os.environ"}
    for module in modules():
        for node in module.nodes:
            if isinstance(node, ast.Assign | ast.Delete | ast.AugAssign):
                targets = node.targets if not isinstance(node, ast.AugAssign) else [node.target]
                assert not any("environ" in ast.unparse(target).split("[")[0].split(".") for target in targets), (
                    f"{module.name}:{node.lineno} writes the environment"
                )


def test_what_counts_as_a_use(tmp_path):
    bad = 'import os\nfrom os import environ, path\nos.getenv("A")\n\ndef f():\n    return os.environ["B"]\n'
    assert uses(made_up(tmp_path, {"comm/bad.py": bad})) == [
        "comm/bad.py:2 os.environ",
        "comm/bad.py:3 os.getenv",
        "comm/bad.py:6 os.environ",
    ]
