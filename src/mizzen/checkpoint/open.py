"""One way in for all that reads a checkpoint: whoever wrote it, a Source comes out."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from mizzen.checkpoint import foreign
from mizzen.checkpoint.source import Source
from mizzen.checkpoint.sources import open_own
from mizzen.errors import CheckpointError

Opener = Callable[[Path, str | None], Source | None]

OPENERS: Final[tuple[Opener, ...]] = (open_own, foreign.open)
"""Asked in this order; one that does not know the path answers None, and the last one raises."""


def open_source(path: str | Path, tag: str | None = None) -> Source:
    """The checkpoint at a path: a file, the folder of a tag, or the folder above it."""
    for opener in OPENERS:
        if (source := opener(Path(path), tag)) is not None:
            return source
    raise CheckpointError(f"{path}: no checkpoint that is known")
