"""Masters take what was written to the values beside them, and keep their low bits elsewhere."""

import pytest
import torch

from mizzen.kernels.masters import keep_writes, plain_keep_writes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 1, 70_000])
def test_what_was_written_is_kept(dtype, size):
    torch.manual_seed(0)
    masters = torch.randn(size)
    values, before = masters.to(dtype), masters.clone()
    keep_writes(values, masters)
    assert torch.equal(masters, before)
    values[size // 2 :] = 0.5
    expected = torch.where(values == before.to(dtype), before, values.float())
    plain = before.clone()
    keep_writes(values, masters)
    plain_keep_writes(values, plain)
    assert torch.equal(masters, expected) and torch.equal(plain, expected)


def test_a_value_that_is_no_number_is_written_too():
    masters = torch.tensor([1.0, 2.0])
    keep_writes(torch.tensor([float("nan"), 2.0], dtype=torch.bfloat16), masters)
    assert masters[0].isnan() and masters[1] == 2
