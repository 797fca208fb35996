"""The stream of a forward pass: the one that torch begins at the seed, apart from the process's own."""

import hashlib

import torch

from mizzen.engine.randomness import RandomStream

MIXED = int.from_bytes(hashlib.sha256(b"3 [0, 1]").digest()[:8], "little") >> 1
"""Of seed 3 and the place (0, 1)."""


def draw():
    return torch.cat([torch.rand(3), torch.randn(17)])


def test_it_is_what_torch_draws_after_the_seed_and_moves_nothing_else():
    torch.manual_seed(MIXED)
    wanted, later = draw(), draw()
    torch.manual_seed(0)
    own = draw()
    torch.manual_seed(0)
    stream = RandomStream(3, (0, 1))
    with stream.active():
        assert torch.equal(draw(), wanted)
    assert torch.equal(draw(), own)
    with stream.active():
        assert torch.equal(draw(), later)
