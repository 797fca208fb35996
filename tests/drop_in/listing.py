"""Every public module and name of DeepSpeed, held against the table. As a program it writes `missing.txt` anew.

`names.txt` is the listing. `missing.txt` is what the drop-in does not have of it: parts of kernels and of other inner
works, variables of modules, texts, and names that other packages own.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
NAMES, MISSING = HERE / "names.txt", HERE / "missing.txt"
FOLDER = HERE.parent.parent / "compat"
LEAST = (334, 2189)
"""Modules and names that are there; raised when there are more."""


@contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """A module of the drop-in, of which nothing is left behind."""
    before = {other for other in sys.modules if other.partition(".")[0] == "deepspeed"}
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
        if not before:
            sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "deepspeed.finder"]
            for other in [other for other in sys.modules if other.partition(".")[0] == "deepspeed"]:
                del sys.modules[other]


def table() -> ModuleType:
    """The table."""
    with imported("deepspeed.table") as found:
        return found


def listed() -> dict[str, list[str]]:
    """Module -> its names, as the listing has them."""
    lines = [line for line in NAMES.read_text().splitlines() if line and not line.startswith("#")]
    return {module: names.split() for module, _, names in (line.partition(":") for line in lines)}


def missing() -> tuple[list[str], dict[str, list[str]]]:
    """(modules that are not there, module -> names that are not there)."""
    with imported("deepspeed.finder") as finder:
        contents, absent = finder.contents(), {}
        modules = [module for module in listed() if module not in contents]
        for module, names in listed().items():
            have = finder.Finder.names(module) if module in contents else set()
            if lacking := [name for name in names if name.rstrip("()*") not in have]:
                absent[module] = lacking
    return modules, absent


def there() -> tuple[int, int]:
    """How many modules and names there are."""
    modules, absent = missing()
    names = sum(map(len, listed().values())) - sum(map(len, absent.values()))
    return len(listed()) - len(modules), names


def missing_text() -> str:
    """What is missing, as the file has it: whole modules first, then names of those that are there."""
    modules, absent = missing()
    lines = [f"{module}: {' '.join(absent.get(module, []))}".rstrip() for module in modules]
    rest = [f"{module}: {' '.join(names)}" for module, names in absent.items() if module not in modules]
    return "\n".join(["# Modules that are not there", *lines, "", "# Names that are not there", *rest, ""])


if __name__ == "__main__":
    MISSING.write_text(missing_text())
    sys.stdout.write(f"{there()} of {len(listed())} modules and {sum(map(len, listed().values()))} names\n")
