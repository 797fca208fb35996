"""Random numbers of ranks that share a matrix: alike where they hold the same activation, different where it is cut.

The ranks begin alike, since an engine gives them one stream. Inside of `differing` each of them draws numbers of its
own, that follow from that stream and from the place of the rank: nothing has to be kept, saved or rewound beside it.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mizzen.accelerator import get_accelerator


@contextmanager
def differing(group: ProcessGroup | None) -> Iterator[None]:
    """Inside, each rank of the group draws other random numbers. Every rank of it comes here, as to a collective.

    For the dropout of activations of which each rank has a part: heads of attention, the columns between two matrices,
    or a part of the sequence.
    """
    if group is None or group.size() == 1:
        yield
        return
    with seeded(drawn_seed(), group.rank()):
        yield


@contextmanager
def seeded(*seed: Any) -> Iterator[None]:
    """Inside, random numbers follow from these words and numbers; afterwards they go on where they were."""
    accelerator = get_accelerator()
    host, device = torch.get_rng_state(), None if accelerator.shares_host_memory else accelerator.rng_state()
    digest = hashlib.sha256(repr(seed).encode()).digest()
    start_streams(int.from_bytes(digest[:8], "little") >> 1)
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if device is not None:
            accelerator.set_rng_state(device)


def drawn_seed() -> int:
    """A number from the stream of the host: reading one from the device would wait for it."""
    return int(torch.randint(1 << 62, (), device="cpu"))


def start_streams(seed: int) -> None:
    """Seed the streams of the host and of the device."""
    torch.default_generator.manual_seed(seed)
    if not get_accelerator().shares_host_memory:
        get_accelerator().seed(seed)


def dropout(x: Tensor, p: float, group: ProcessGroup | None, *, training: bool = True) -> Tensor:
    """Dropout of an activation of which each rank of the group has a part."""
    with differing(group):
        return torch.nn.functional.dropout(x, p, training)
