"""Makes the modules that the table lists. No file stands behind them: a name is looked up when it is asked for."""

import importlib
import json
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from os.path import dirname, join
from types import CodeType, ModuleType
from typing import Any, Final

from deepspeed.table import CONSTANTS, ROWS, RUNNABLE, STARS
from deepspeed.table.row import Row

ALL: Final = "*"


@cache
def contents() -> dict[str, dict[str, Row]]:
    """Module -> name -> the row that has it. Packages on the way to a module are there, too, if only as a way."""
    found: dict[str, dict[str, Row]] = {}
    for path in (*CONSTANTS, *STARS, *(path for row in ROWS for path in row.paths)):
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:count]), {})
    for row in ROWS:
        for path in row.paths:
            for name in row.names:
                found[path][name] = row
    return found


@cache
def constants(path: str) -> dict[str, Any]:
    """Name -> value of the constants of a module: its own before those that it has from others."""
    found = {name: value for other in STARS.get(path, ()) for name, value in constants(other).items()}
    if path in CONSTANTS:
        with open(join(dirname(__file__), "values", f"{path.split('.')[1]}.json"), encoding="utf8") as file:
            found |= json.load(file)[path]
    return found


@cache
def children() -> dict[str, set[str]]:
    """Package -> the modules in it."""
    found: dict[str, set[str]] = {}
    for path in contents():
        package, _, name = path.rpartition(".")
        found.setdefault(package, set()).add(name)
    return found


def resolve(path: str, name: str) -> Any:
    """What a name of a module means: a name of mizzen, a face, a constant, a module below, or a stand-in."""
    names = contents()[path]
    if name in names:
        return _found(names[name], name)
    if name in constants(path):
        return constants(path)[name]
    if name in children().get(path, ()):
        return importlib.import_module(f"{path}.{name}")
    if ALL in names and not name.startswith("__"):
        home = importlib.import_module(names[ALL].home)
        if name in home.__all__:
            return getattr(home, name)
    raise AttributeError(f"module {path!r} has no attribute {name!r}", name=name, obj=sys.modules[path])


def _found(row: Row, name: str) -> Any:
    if row.waits_for:
        from deepspeed.absent import absent

        return absent(row.paths[0], name, row.waits_for, _class(row.base) if row.base else None)
    home, own = row.home, row.names[name]
    module = importlib.import_module(home)
    return module if own == "." else getattr(module, own)


def _class(path: str) -> type:
    module, _, name = path.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found


class Listed(ModuleType):
    """A module of the table. A name that it lists is not lost to a module below that is called the same."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in contents()[self.__name__]):
            super().__setattr__(name, value)


class Finder:
    """Finds and makes the modules of the table; those that have files are Python's own business.

    A finder and a loader by its methods: the classes that Python has for that load eighty modules of their own.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A module of the table, or None."""
        if not fullname.startswith("deepspeed.") or fullname not in contents():
            return None
        is_package = self.is_package(fullname)
        return ModuleSpec(fullname, self, origin="mizzen", is_package=is_package)  # type: ignore[arg-type]

    def is_package(self, fullname: str) -> bool:
        """Whether modules are below."""
        return fullname in children()

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty one."""
        return Listed(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Let names be looked up when they are asked for."""
        path = module.__name__

        def look_up(name: str) -> Any:
            found = vars(module)[name] = resolve(path, name)
            return found

        vars(module)["__getattr__"] = look_up
        vars(module)["__dir__"] = lambda: sorted({*vars(module), *self.names(path)})
        vars(module)["__all__"] = [name for name in self.names(path) if not name.startswith("_")]
        vars(module)["__doc__"] = "Names that users import from here; the table of this package says where they live."

    def get_source(self, fullname: str) -> str:
        """What `python -m` runs."""
        if fullname not in RUNNABLE:
            return f"raise SystemExit('{fullname} is not a program')\n"
        home, _, function = RUNNABLE[fullname].partition(":")
        return f"from {home} import {function}\n\nraise SystemExit({function}())\n"

    def get_code(self, fullname: str) -> CodeType:
        """The program of a module, compiled."""
        return compile(self.get_source(fullname), f"<{fullname}>", "exec")

    @staticmethod
    def names(path: str) -> set[str]:
        """All names of a module, those of its own modules included."""
        rows = contents().get(path, {})
        found = {name for name in rows if name != ALL} | children().get(path, set())
        found |= constants(path).keys()
        return found | set(importlib.import_module(rows[ALL].home).__all__ if ALL in rows else ())
