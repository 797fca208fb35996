"""One way in for all that reads a checkpoint: whoever wrote it, a Source comes out. What can be asked of any Source.

Our own checkpoints are Sources by `CommittedSource`; those of other programs come out of `foreign`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from torch import Tensor

from mizzen.checkpoint import foreign
from mizzen.checkpoint.choose import candidates
from mizzen.checkpoint.manifest import is_plain
from mizzen.checkpoint.read import MANIFEST, Reader
from mizzen.checkpoint.source import Entry, Source
from mizzen.checkpoint.tagged_json import decode
from mizzen.checkpoint.tensors import DTYPES

OWN: Final = frozenset({"rng", "client"})
"""Kinds that are ours alone, and mean nothing to others."""


class CommittedSource:
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
        return _Facts(self.reader)


class _Facts(Mapping[str, object]):
    """Facts of which the client state is read when it is asked for: weights do not depend on it."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        facts = dict(reader.manifest.facts)
        own = {"client_state": facts.pop("client", {}), "format": "mizzen", "tag": reader.manifest.tag}
        self._found: dict[str, object] = facts | own

    def __getitem__(self, key: str) -> object:
        found = self._found[key]
        return decode(found, lambda name: self._reader.whole("client", name)) if key == "client_state" else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def open_source(path: str | Path, tag: str | None = None) -> Source:
    """The checkpoint at a path: a file, the folder of a tag, or the folder above it."""
    return _open_own(Path(path), tag) or foreign.open(path, tag)


def _open_own(path: Path, tag: str | None) -> Source | None:
    """A checkpoint of ours: the folder of a tag, or the folder of folders; None when there is none."""
    if tag is None and (path / MANIFEST).exists():
        return CommittedSource(Reader(path))
    tags = candidates(path, tag, with_older=False) if tag is None or is_plain(tag) else []
    if tags and (path / tags[0] / MANIFEST).exists():
        return CommittedSource(Reader(path / tags[0]))
    return None


def aliases_of(source: Source) -> dict[str, str]:
    """Further names of weights, each with the name under which the weight is there."""
    found = source.facts().get("aliases")
    return {str(alias): str(name) for alias, name in found.items()} if isinstance(found, Mapping) else {}


def weights_of(source: Source) -> dict[str, Entry]:
    """The weights and buffers by name, each once and with the most bits: the master where there is one."""
    found = {entry.name: entry for entry in source.names() if entry.kind == "model"}
    found |= {entry.name: entry for entry in source.names() if entry.kind == "master"}
    twice = {alias for alias, name in aliases_of(source).items() if name in found}
    return {name: entry for name, entry in found.items() if name not in twice}
