"""Which samples a rank takes, and when: arithmetic over an epoch's order. Loading them is `loader.py`'s business.

[Note: the order of samples]
An epoch has one global order, a permutation made from (seed, epoch) and nothing else. Optimizer step s takes places
[s*T, (s+1)*T) of it, T being the train batch size. They are split micro-step by micro-step and then rank by rank:
micro-step m of rank r takes `micro` places from s*T + m*micro*ranks + r*micro on. So the samples of a step are the same
for every number of ranks and every split of T, and a position is one number: the places handed out so far.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Sampler

from mizzen.errors import UsageError

Ending = Literal["wrap", "drop", "short"]
"""What becomes of the samples that do not fill the last train batch of an epoch.

wrap    it is filled from the beginning of the same epoch's order, so that every rank gets as many micro-batches
drop    they are left out
short   they are handed out as they are: some ranks get a shorter micro-batch, or one less
"""


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """Where a loader is, for all ranks together."""

    epoch: int = 0
    samples: int = 0
    """Places of the epoch's order that were handed out, over all ranks."""


@dataclass(frozen=True, slots=True)
class BatchShare:
    """How a train batch is split, and which part of it is this rank's."""

    micro: int
    rank: int = 0
    ranks: int = 1
    accumulation: int = 1

    def __post_init__(self) -> None:
        if self.micro < 1 or self.accumulation < 1 or not 0 <= self.rank < self.ranks:
            raise UsageError(f"{self} is no share of a batch: counts are 1 or more, and the rank is one of the ranks")

    @property
    def round(self) -> int:
        """Samples that all ranks take in one micro-step."""
        return self.micro * self.ranks

    @property
    def step(self) -> int:
        """Samples of one optimizer step: the train batch size."""
        return self.round * self.accumulation

    def places(self, start: int, number: int) -> range:
        """The places of this rank's micro-batch `number`, counted from the global place `start`."""
        first = start + number * self.round + self.rank * self.micro
        return range(first, first + self.micro)

    def micro_batches(self, size: int, start: int, ending: Ending) -> int:
        """How many micro-batches this rank still gets from `size` samples when `start` of them were handed out."""
        if ending == "short":
            return max(0, _ceil(size - start - self.rank * self.micro, self.round))
        if ending == "drop":
            return max(0, (size // self.step * self.step - start) // self.round)
        return max(0, _ceil(_ceil(size, self.step) * self.step - start, self.round))


def _ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def derive_seed(*parts: int | str) -> int:
    """A seed for one purpose; any two different lists of parts give unrelated ones."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def epoch_order(size: int, *, seed: int, epoch: int) -> Tensor:
    """The order of an epoch: a permutation of all samples."""
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(size, generator=generator)


class MicroBatches(Sampler[list[int]]):
    """The indices of one rank's micro-batches, from a place in an epoch's order to its end."""

    def __init__(self, order: Tensor, share: BatchShare, *, start: int = 0, ending: Ending = "wrap") -> None:
        self.order = order
        self.share = share
        self.start = start
        self.ending = ending

    def __len__(self) -> int:
        return self.share.micro_batches(len(self.order), self.start, self.ending)

    def __iter__(self) -> Iterator[list[int]]:
        size = len(self.order)
        for number in range(len(self)):
            places = self.share.places(self.start, number)
            if self.ending == "short":
                yield self.order[places.start : places.stop].tolist()
            else:
                yield self.order[torch.arange(places.start, places.stop) % size].tolist()
