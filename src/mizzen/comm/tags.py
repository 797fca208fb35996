"""Tags: the ranks of a group compare where they are before they exchange data, so that those who parted ways find out.

On a CPU the comparison comes before the collective, because gloo aborts the process when sizes differ. On a device it
is one small reduction whose outcome stays there, as a flag for the step's own reduction. Only a collective that is
given a tag pays for this.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from mizzen.comm.backend import Request, ranks_in_words
from mizzen.errors import CommError

TEXT: Final = 256
"""Bytes of a tag in words, as they are exchanged once tags differ."""
UNEVEN: Final = ("all_to_all", "all_to_all_single", "gather", "scatter")
"""Collectives to which the ranks may bring messages of different sizes."""


@dataclass(frozen=True, slots=True)
class Tag:
    """Where a rank is when it comes to a collective."""

    step: int
    unit: str
    phase: str

    def __str__(self) -> str:
        return f"step {self.step}, unit {self.unit!r}, phase {self.phase!r}"


def words(tag: Tag, request: Request) -> str:
    """All that the ranks must agree on: the tag, the operation, and the sizes where these have to be equal."""
    sizes = "" if request.operation in UNEVEN else " + ".join(f"{t.numel()} {t.dtype}" for t in request.payload)
    return f"{tag}: {request.title}" + (f" of {sizes}" if sizes else "")


def digest(text: str) -> int:
    """62 bits of a hash: the negative of it is a 64-bit integer as well."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2


def compare(text: str, ranks: Sequence[int], gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise on every rank alike when the texts of the group's ranks differ; `gather` stacks one row per rank."""
    digests = gather(torch.tensor([digest(text)])).flatten().tolist()
    if len(set(digests)) == 1:
        return
    padded = text.encode()[:TEXT].ljust(TEXT, b"\0")
    rows = gather(torch.frombuffer(bytearray(padded), dtype=torch.uint8))
    places: dict[str, list[int]] = {}
    for rank, row in zip(ranks, rows, strict=True):
        place = bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore")
        places.setdefault(place, []).append(rank)
    raise CommError(
        "the ranks have parted ways; nothing was exchanged. "
        + "; ".join(f"{ranks_in_words(members)} at {place}" for place, members in places.items())
    )


def differ_on_device(value: int, device: torch.device, reduce_max: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """A flag on the device that is true when the ranks' hashes differ; the host is not synchronised."""
    # `full` passes the number with the kernel, where copying a host tensor would wait for the stream.
    both = torch.cat([torch.full((1,), number, dtype=torch.int64, device=device) for number in (value, -value)])
    reduce_max(both)
    return both.sum() != 0  # the largest digest minus the smallest
