"""Checkpoints as Sources: ours, and whatever else a reader knows. Export and the fp32 functions read only Sources."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from mizzen.checkpoint.choose import candidates
from mizzen.checkpoint.read import MANIFEST, Reader
from mizzen.checkpoint.source import Entry, Source
from mizzen.checkpoint.tagged import decode
from mizzen.checkpoint.tensors import DTYPES
from mizzen.errors import CheckpointError

OWN: Final = frozenset({"rng", "client"})
"""Kinds that are ours alone, and mean nothing to others."""


class Committed:
    """A committed checkpoint of ours."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def names(self) -> Sequence[Entry]:
        """Weights, buffers and optimizer states."""
        return [
            Entry(each.kind, each.name, each.shape, DTYPES[each.dtype])
            for each in self.reader.entries.values()
            if each.kind not in OWN
        ]

    def read(self, entry: Entry) -> Tensor:
        """A whole tensor."""
        return self.reader.whole(entry.kind, entry.name)

    def facts(self) -> Mapping[str, object]:
        """The facts of the manifest, and the client state as it was given."""
        facts: dict[str, Any] = dict(self.reader.manifest.facts)
        facts["client_state"] = decode(facts.pop("client", {}), lambda name: self.reader.whole("client", name))
        return facts | {"format": "mizzen", "tag": self.reader.manifest.tag}


def open_own(path: Path, tag: str | None) -> Source | None:
    """A checkpoint of ours: the folder of a tag, or the folder of folders; None when there is none."""
    if tag is None and (path / MANIFEST).exists():
        return Committed(Reader(path))
    tags = candidates(path, tag, with_older=False)
    if tags and (path / tags[0] / MANIFEST).exists():
        return Committed(Reader(path / tags[0]))
    return None


READERS: Final[tuple[Callable[[Path, str | None], Source | None], ...]] = (open_own,)
"""Each takes a path and a tag, and gives a Source, or None for what is not of its format."""


def open_source(path: Path, tag: str | None = None) -> Source:
    """A checkpoint of any known format."""
    for reader in READERS:
        found = reader(path, tag)
        if found is not None:
            return found
    where = f"{path}" + (f", tag '{tag}'" if tag else "")
    raise CheckpointError(f"{where}: no checkpoint of a known format is there")


def weights_of(source: Source) -> dict[str, Entry]:
    """The weights and buffers by name, each with the most bits: the master where there is one."""
    found = {entry.name: entry for entry in source.names() if entry.kind == "model"}
    return found | {entry.name: entry for entry in source.names() if entry.kind == "master"}
