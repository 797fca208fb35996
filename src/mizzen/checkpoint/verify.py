"""Looking at checkpoints: is every byte what was written, and in what do two of them differ."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mizzen.checkpoint.manifest import FileEntry, Manifest
from mizzen.checkpoint.read import Reader, Verified
from mizzen.checkpoint.tensors import DTYPES
from mizzen.errors import CheckpointError, FileError
from mizzen.wording import and_more

OnBytes = Callable[[int], None]


def verify(reader: Reader, on_bytes: OnBytes | None = None) -> list[str]:
    """Read every byte and compare its hash; what is wrong, by file and tensor. `on_bytes` hears of progress."""
    manifest = reader.manifest
    wrong = [f"{entry}: its parts do not hold each element once" for entry in reader.torn()]
    for file in manifest.files:
        wrong += _verify_file(reader, file, on_bytes)
    return wrong


def _verify_file(reader: Reader, file: FileEntry, on_bytes: OnBytes | None) -> Iterator[str]:
    manifest = reader.manifest
    try:
        opened = Verified(reader.folder, file, manifest.chunk)
    except (CheckpointError, FileError) as error:
        yield f"{error} (it holds {_held(manifest, file, 0, file.size)})"
        return
    buffer = memoryview(bytearray(min(manifest.chunk, max(file.size, 1))))
    try:
        for start in range(0, file.size, manifest.chunk):
            count = min(manifest.chunk, file.size - start)
            try:
                opened.read_into(buffer[:count], start)
            except (CheckpointError, FileError) as error:
                yield f"{error} (it holds {_held(manifest, file, start, start + count)})"
            if on_bytes is not None:
                on_bytes(count)
    finally:
        opened.close()


def _held(manifest: Manifest, file: FileEntry, start: int, stop: int) -> str:
    """The tensors that have bytes in a range of a file."""
    names = []
    for part in file.parts:
        entry = manifest.tensors[part.tensor]
        end = part.offset + part.box.numel * DTYPES[entry.dtype].itemsize
        if part.offset < stop and end > start:
            names.append(f"{entry.kind} '{entry.name}'")
    return and_more(names, 3) or "only the header of the file"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two checkpoints differ."""

    what: str
    one: str
    other: str


def compare(one: Reader, other: Reader, on_bytes: OnBytes | None = None) -> Iterator[Difference]:
    """Tensor by tensor, then fact by fact; one tensor of each is in memory at a time."""
    first, second = one.entries, other.entries
    for key in dict.fromkeys((*first, *second)):
        title = f"{key[0]} '{key[1]}'"
        a, b = first.get(key), second.get(key)
        if a is None or b is None:
            yield Difference(title, "there" if a else "absent", "there" if b else "absent")
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            yield Difference(title, f"{list(a.shape)} {a.dtype}", f"{list(b.shape)} {b.dtype}")
        else:
            left, right = one.whole(*key), other.whole(*key)
            if not torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8)):
                yield Difference(title, *_values(left, right))
            if on_bytes is not None:
                on_bytes(a.nbytes)
    left_facts, right_facts = _flat(one.manifest.facts), _flat(other.manifest.facts)
    for path in dict.fromkeys((*left_facts, *right_facts)):
        if left_facts.get(path) != right_facts.get(path):
            yield Difference(path, str(left_facts.get(path, "absent")), str(right_facts.get(path, "absent")))


def _values(left: torch.Tensor, right: torch.Tensor) -> tuple[str, str]:
    if not left.is_floating_point():
        return f"{int((left != right).sum())} elements differ", ""
    a, b = left.double(), right.double()
    return (
        f"norm {float(a.norm()):.6g}",
        f"norm {float(b.norm()):.6g}, largest difference {float((a - b).abs().max()):.3g}",
    )


def _flat(facts: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in facts.items():
        here = f"{path}.{key}" if path else str(key)
        found |= _flat(value, here) if isinstance(value, Mapping) and value else {here: value}
    return found
