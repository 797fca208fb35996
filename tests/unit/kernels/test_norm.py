"""Sums of squares that do not depend on the cut, and flags that name what is not finite."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.kernels.norm import are_finite, sum_of_squares

CPU = torch.device("cpu")


def rounded(tensors):
    return sum_of_squares(tensors, device=CPU).sqrt().float().item()


@settings(max_examples=50)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(0, 300_000),
    cuts=st.lists(st.floats(0, 1), max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_any_cut_gives_the_same_norm(seed, size, cuts, dtype):
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    places = [0, *sorted(round(cut * size) for cut in cuts), size]
    parts = [values[low:high] for low, high in zip(places, places[1:], strict=False)]
    assert rounded(parts) == rounded([values]) == rounded(parts[::-1])


def test_a_flat_fp32_norm_would_not_be_good_enough():
    values = torch.full((20_000_000,), 0.1)
    exact = math.sqrt(20_000_000 * torch.tensor(0.1).double().item() ** 2)
    assert rounded([values]) == torch.tensor(exact).item()


def test_shapes_do_not_matter():
    values = torch.randn(6, 7)
    expected = values.double().square().sum().item()
    for tensor in (values, values.t(), values.reshape(-1), values[:, None]):
        assert sum_of_squares([tensor], device=CPU).item() == pytest.approx(expected, rel=1e-14)


def test_the_result_is_one_fp64_number():
    for tensors in ([], [torch.zeros(0)], [torch.tensor(3.0)], iter([torch.ones(3, dtype=torch.float16)] * 3)):
        total = sum_of_squares(tensors, device=CPU)
        assert (total.dtype, total.shape) == (torch.float64, ())
    assert total.item() == pytest.approx(9.0, rel=1e-15)


def test_squares_beyond_fp32_are_numbers():
    assert sum_of_squares([torch.tensor([3e38, 4e38 / 2])], device=CPU).item() > 1e76


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_the_sum(bad):
    assert not math.isfinite(sum_of_squares([torch.ones(3), torch.tensor([1.0, bad])], device=CPU).item())


def test_gradients_that_need_grad_are_only_looked_at():
    values = torch.ones(4, requires_grad=True)
    assert not sum_of_squares([values], device=CPU).requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_each_tensor_has_its_own_flag(dtype, bad):
    good = [torch.randn(5, 3), torch.zeros(0), torch.tensor(2.0), torch.full((70_000,), 100.0)]
    tensors = [tensor.to(dtype) for tensor in (*good, torch.tensor([[1.0, bad]]), torch.tensor(bad))]
    assert are_finite(tensors).tolist() == [True, True, True, True, False, False]


def test_no_tensors_have_no_flags():
    assert are_finite([]).tolist() == []
    assert are_finite([]).dtype == torch.bool
