"""The library's files, parsed once, for the tests that look at how it is written."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "mizzen"
FACES = frozenset(
    {
        "api.py",
        "zero.py",
        "pipe.py",
        "tensor.py",
        "engine/interface.py",
        "engine/status.py",
        "comm/__init__.py",
        "profiler/model_profile.py",
    }
)
"""Files whose whole job is a wide, known signature. They hold no logic, and no count applies to them."""


@dataclass(frozen=True)
class Module:
    """One file: `name` is its path below the package, `unit` the folder or file of the table of rows it belongs to."""

    name: str
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree: to walk through all of the library takes a second."""
        return tuple(ast.walk(self.tree))

    @property
    def unit(self) -> str:
        return self.name.split("/")[0].removesuffix(".py")

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        return (node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))


@cache
def modules(root: Path = SOURCE) -> tuple[Module, ...]:
    """Every Python file under a package's folder, in the order of their names."""
    texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf8") for path in root.rglob("*.py")}
    return tuple(Module(name, text, ast.parse(text, name)) for name, text in sorted(texts.items()))


def made_up(root: Path, files: dict[str, str]) -> tuple[Module, ...]:
    """A small package written for one test: path -> text."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return modules(root)
