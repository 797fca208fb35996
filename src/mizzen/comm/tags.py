"""Tags: the ranks of a group compare where they are before they exchange data, so that those who parted ways find out.

On a CPU the comparison comes before the collective, because gloo aborts the process when sizes differ, or writes a part
of the result in silence. On a device it is one small reduction whose outcome stays there, as a flag for the step's own
reduction, and only a collective that is given a tag pays for it.
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
EXCHANGES: Final = ("all_to_all", "all_to_all_single")
"""Collectives in which every two ranks have a size of their own."""
UNEVEN: Final = (*EXCHANGES, "gather", "scatter")
"""Collectives to which the ranks may bring messages of different sizes; gloo takes only exchanges of them."""
Gather = Callable[[torch.Tensor], torch.Tensor]
"""Stacks the rows of the ranks of a group."""


@dataclass(frozen=True, slots=True)
class Tag:
    """Where a rank is when it comes to a collective."""

    step: int
    unit: str
    phase: str

    def __str__(self) -> str:
        return f"step {self.step}, unit {self.unit!r}, phase {self.phase!r}"


def words(request: Request, tag: Tag | None = None, *, uneven: Sequence[str] = UNEVEN) -> str:
    """All that the ranks must agree on: the tag, the operation, and the sizes where these have to be equal."""
    kinds = [(tensor.numel(), tensor.dtype) for tensor in request.payload]
    if request.operation in uneven:
        sizes = " + ".join(dict.fromkeys(str(dtype) for _, dtype in kinds)) if uneven is EXCHANGES else ""
    else:
        sizes = " + ".join(f"{count} {dtype}" for count, dtype in kinds)
    what = f"{request.title} of {sizes}" if sizes else request.title
    return what if tag is None else f"{tag}: {what}"


def parts(request: Request, ranks: int) -> tuple[list[int], list[int]]:
    """How many elements an exchange sends to each rank, and expects of each; -1 where its arguments do not say."""
    received, sent, *splits = request.arguments
    if request.operation == "all_to_all":
        sends, expects = ([tensor.numel() for tensor in tensors] for tensors in (sent, received))
    else:
        expects, sends = _split(received, splits[0], ranks), _split(sent, splits[1], ranks)
    unknown = [-1] * ranks
    return sends if len(sends) == ranks else unknown, expects if len(expects) == ranks else unknown


def _split(tensor: torch.Tensor, rows: Sequence[int] | None, ranks: int) -> list[int]:
    if not rows:
        return [tensor.numel() // ranks] * ranks
    width = tensor.numel() // max(len(tensor), 1)
    return [count * width for count in rows]


def compare_parts(sends: list[int], expects: list[int], ranks: Sequence[int], gather: Gather) -> None:
    """Raise on every rank alike when one sends another more, or less, than that one expects."""
    rows = gather(torch.tensor([*sends, *expects])).tolist()
    size = len(ranks)
    for place, row in enumerate(rows):
        for other, (sent, expected) in enumerate(zip(row[:size], (each[size + place] for each in rows), strict=True)):
            if sent != expected and -1 not in (sent, expected):
                raise CommError(
                    f"the parts of an exchange do not fit; nothing was exchanged. Rank {ranks[place]} sends "
                    f"{sent} elements to rank {ranks[other]}, which expects {expected}"
                )


def digest(text: str) -> int:
    """62 bits of a hash: the negative of it is a 64-bit integer as well."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2


def compare(text: str, ranks: Sequence[int], gather: Gather) -> None:
    """Raise on every rank alike when the texts of the group's ranks differ."""
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
