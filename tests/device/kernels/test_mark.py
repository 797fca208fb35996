"""The mark of values on a GPU: it sees what the plain one sees, and takes no memory."""

import pytest
import torch

from mizzen.accelerator import get_accelerator
from mizzen.kernels.mark import mark_of


@pytest.fixture(autouse=True)
def cuda(device):
    if device.type != "cuda":
        pytest.skip("the kernel is for CUDA devices")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("count", [1, 3, 4, 4095, 4096 * 4, 1_000_003])
def test_every_change_is_seen(dtype, count):
    values = torch.arange(count, device=get_accelerator().device()).remainder(97).to(dtype)
    mark = mark_of(values)
    assert torch.equal(mark, mark_of(values.clone()))
    for place in {0, count // 2, count - 1}:
        written = values.clone()
        written[place] += 1
        assert not torch.equal(mark, mark_of(written)), place
    if count > 2:
        assert not torch.equal(mark, mark_of(values.roll(1)))
    if dtype.is_floating_point:
        signs = values + 1
        assert not torch.equal(mark_of(signs), mark_of(-signs))


def test_it_takes_no_memory():
    values = torch.zeros(1 << 26, device=get_accelerator().device(), dtype=torch.bfloat16)
    mark_of(values)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mark_of(values)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
