"""Sums of squares on an accelerator: exact to fp64, and without a copy of what is summed."""

import pytest
import torch

from mizzen.kernels.norm import sum_of_squares


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_a_plain_loop_in_double_precision(dtype):
    tensors = [torch.randn(size, device="cuda", dtype=dtype) for size in (1, 33, 65_537, 3_000_001)]
    expected = sum(float(tensor.double().square().sum()) for tensor in tensors)
    found = sum_of_squares([*tensors, tensors[0][:0]], device=torch.device("cuda"))
    assert found.dtype == torch.float64 and found.shape == ()
    assert float(found) == pytest.approx(expected, rel=1e-13)


def test_nothing_is_copied():
    tensor = torch.randn(1 << 26, device="cuda")
    sum_of_squares([tensor], device=tensor.device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sum_of_squares([tensor], device=tensor.device)
    assert torch.cuda.max_memory_allocated() - before < tensor.nbytes // 100
