"""Quantized messages: their size, their error, and what they do with numbers that are none."""

import pytest
import torch

from mizzen.kernels.quantize import BLOCK, pack, unpack


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [1, 127, 128, 1000])
def test_there_and_back(bits, count):
    values = torch.randn(3, count, generator=torch.Generator().manual_seed(count)) * torch.tensor(
        [[1e-3], [1.0], [1e3]]
    )
    messages = pack(values, bits)
    blocks = -(-count // BLOCK)
    assert messages.shape == (3, blocks * (BLOCK * bits // 8 + 4))
    found = unpack(messages, count, bits)
    blocks = -(-count // BLOCK)
    for row in range(3):
        for block in range(blocks):
            part = slice(block * BLOCK, min(count, (block + 1) * BLOCK))
            step = values[row, part].abs().max() / (2 ** (bits - 1) - 1)
            assert (found[row, part] - values[row, part]).abs().max() <= 0.5001 * step


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so():
    values = torch.zeros(2, 2 * BLOCK)
    assert not unpack(pack(values, 4), 2 * BLOCK, 4).any()
    values[0, 3], values[1, BLOCK] = float("nan"), float("inf")
    found = unpack(pack(values, 8), 2 * BLOCK, 8)
    assert not found[0, :BLOCK].isfinite().any()
    assert not found[1, BLOCK:].isfinite().any()
    assert not found[1, :BLOCK].any()


@pytest.mark.parametrize(("bits", "fp32", "bf16"), [(8, 3.8, 1.9), (4, 7.5, 3.7)])
def test_messages_are_smaller(bits, fp32, bf16):
    count = 1 << 20
    size = pack(torch.zeros(1, count), bits).nbytes
    assert 4 * count / size > fp32
    assert 2 * count / size > bf16
