"""What processes of tests share, and need not make twice: fixtures of a file, the parsed library, large packages."""

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[1]
WIDER: Final = re.compile(r"""scope=["'](class|module|package)["']""")


def stays_with(nodeid: str) -> str:
    """What a test is given to a worker with: those of its file, its ring or its package, or nothing but itself."""
    name = nodeid.partition("::")[0]
    if name.startswith("tests/house/"):
        return "tests/house"
    text = _text(ROOT / name)
    if name.startswith("tests/unit/") and ("transformers" in text or "llamas" in text):
        return "transformers"  # seconds to load, in each worker that needs it
    return name if WIDER.search(text) else nodeid


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf8")


class Later:
    """A module that is imported when it is first used, and not by every worker that looks for tests.

    Where it, or what it `needs`, is not installed, the test that uses it is skipped.
    """

    def __init__(self, name: str, needs: str | None = None) -> None:
        self._name = name
        self._needs = needs or name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # pytest asks everything in a file whether it is a test
            raise AttributeError(name)
        pytest.importorskip(self._needs)
        return getattr(import_module(self._name), name)
