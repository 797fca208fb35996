"""How ranks agree: each of them says something, all wait for the others within a limit, and who differs is named.

Over a group, texts are compared by their digests, and exchanged only where these differ (`differing_texts`). Before
there is a group, or where a rank may not come, each rank puts a value into the store of the job under a name that all
of them know (`Ballot`). What a difference means, and what to do about it, is the caller's business.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch

from mizzen.comm.backend import KeyValueStore

VERSIONS: Final = 8
"""How many different texts are exchanged: enough to name the odd rank, whatever the size of the job."""
CHUNK: Final = 1 << 16
"""Bytes of a text that each rank sends at a time."""
Gather = Callable[[torch.Tensor], torch.Tensor]
"""Stacks the rows of the ranks of a group; every rank of it gives a row of the same size."""


def digest(text: str) -> int:
    """62 bits of a hash: the negative of it is a 64-bit integer as well."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2


def differing_texts(
    text: str, gather: Gather, *, numbers: Sequence[int] = (), longest: int | None = None
) -> tuple[dict[int, str], list[list[int]]]:
    """The texts of a group by the place of each rank, none where all are alike; and the numbers that each sends along.

    What is always exchanged has one size, whatever the texts are, so that ranks which differ still understand each
    other. Texts are cut at `longest` bytes; places beyond the first few versions have none.
    """
    said = text.encode()[:longest]
    rows = gather(torch.tensor([digest(text), len(said), *numbers])).tolist()
    along = [row[2:] for row in rows]
    if all(row[0] == rows[0][0] for row in rows):
        return {}, along
    first: dict[int, int] = {}
    for place, row in enumerate(rows):
        first.setdefault(row[0], place)
    heard = {place: bytearray() for place in list(first.values())[:VERSIONS]}  # who has the same says nothing new
    size = max(row[1] for row in rows)
    padded = said.ljust(size, b"\0")
    for start in range(0, size, CHUNK):
        parts = gather(torch.frombuffer(bytearray(padded[start : start + CHUNK]), dtype=torch.uint8))
        for place, told in heard.items():
            told += bytes(parts[place].tolist())
    texts = {place: bytes(told[: rows[place][1]]).decode(errors="ignore") for place, told in heard.items()}
    return {place: texts[first[row[0]]] for place, row in enumerate(rows) if first[row[0]] in texts}, along


class Ballot:
    """What some ranks have put into the store under one name, a value each."""

    def __init__(self, store: KeyValueStore, name: str, ranks: Iterable[int]) -> None:
        self._store, self._name, self._ranks = store, name, tuple(ranks)

    def cast(self, rank: int, value: bytes = b"1") -> None:
        """Say something for a rank."""
        self._store.set(self._key(rank), value)

    def is_complete(self) -> bool:
        """Whether all ranks have said something: one question to the store."""
        return self._store.check([self._key(rank) for rank in self._ranks])

    def value(self, rank: int) -> bytes | None:
        """What a rank has said; None if it has not."""
        return self._store.get(self._key(rank)) if self._store.check([self._key(rank)]) else None

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"


def wait_until(is_met: Callable[[], bool], seconds: float, *, pause: float) -> bool:
    """Ask again and again, with a pause, for so many seconds at most; whether the answer was yes in time.

    A wait of the store's own that ends in vain writes warnings to standard error, and one whose host is stopped never
    ends.
    """
    until = time.monotonic() + seconds
    while not is_met():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
    return True
