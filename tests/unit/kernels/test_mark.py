"""The few numbers by which values are recognised: whatever somebody writes to a parameter, they are others."""

import pytest
import torch

from mizzen.kernels.mark import mark_of


def differs(values, write):
    """Whether a write to a copy of some values gives another mark."""
    written = values.clone()
    write(written)
    assert torch.equal(mark_of(values), mark_of(values.clone()))
    return not torch.equal(mark_of(values), mark_of(written))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(64, 768), (64, 4096), (512, 1100), (7, 33)])
@pytest.mark.parametrize("signs", ["random", "alike", "in fours"])
def test_a_column_of_other_signs_is_seen_in_every_lane(dtype, shape, signs):
    values = torch.rand(shape, generator=torch.Generator().manual_seed(3)).add(1).to(dtype)
    if signs == "random":
        values *= torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(4)) * 2 - 1
    if signs == "in fours":  # one magnitude, and signs that cancel, also where rows count by their number
        values = torch.tensor([1.0, -1.0, -1.0, 1.0]).repeat(shape[0])[: shape[0], None].expand(shape).to(dtype)
    for column in range(8):
        assert differs(values, lambda v, at=column: v[:, at].neg_()), column
    assert differs(values, lambda v: v.neg_())


@pytest.mark.parametrize(
    "write",
    [
        lambda v: v[3].add_(1),
        lambda v: v.__setitem__([1, 5], v[[5, 1]].clone()),
        lambda v: v.__setitem__((slice(None), [1, 5]), v[:, [5, 1]].clone()),
        lambda v: v[0, :2].copy_(v[0, :2].flip(0).clone()),
        lambda v: v.zero_(),
    ],
    ids=["a row", "two rows change places", "two columns change places", "two elements change places", "zeros"],
)
def test_other_values_and_other_places_are_seen(write):
    assert differs(torch.randn(130, 257, generator=torch.Generator().manual_seed(5)), write)
