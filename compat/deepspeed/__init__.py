"""Import paths of DeepSpeed over mizzen. Nothing is loaded before it is asked for; `table.py` says where it lives."""

import sys
from typing import Any

from deepspeed.finder import Finder, resolve

__version__ = "0.19.8+mizzen"
version = __version__
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
__git_hash__, __git_branch__ = "mizzen", "mizzen"

if not any(isinstance(finder, Finder) for finder in sys.meta_path):
    sys.meta_path.append(Finder())


def __getattr__(name: str) -> Any:
    found = globals()[name] = resolve("deepspeed", name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *Finder.names("deepspeed")})
