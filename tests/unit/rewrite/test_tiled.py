"""A linear layer in tiles against one that is not."""

import pytest
import torch
from torch import nn

from mizzen.errors import UsageError
from mizzen.rewrite.tiled import parts_of
from mizzen.zero import TiledLinear, TiledLinearReturnBias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("splits", [(1, 1), (2, 3), (5, 1), (1, 7)])
def test_it_computes_what_a_linear_layer_does(bias, splits):
    torch.manual_seed(0)
    plain = nn.Linear(11, 7, bias=bias)
    tiled = TiledLinear(11, 7, bias=bias, in_splits=splits[0], out_splits=splits[1], init_linear=plain)
    one, other = torch.randn(3, 5, 11, requires_grad=True), None
    other = one.detach().clone().requires_grad_()
    torch.testing.assert_close(tiled(one), plain(other))
    tiled(one).square().sum().backward()
    plain(other).square().sum().backward()
    torch.testing.assert_close(one.grad, other.grad)
    rows = [torch.cat([tile.weight.grad for tile in row], 1) for row in tiled.linears]
    torch.testing.assert_close(torch.cat(rows), plain.weight.grad)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in plain.parameters())


def test_input_and_output_in_parts():
    torch.manual_seed(0)
    plain = nn.Linear(10, 6)
    tiled = TiledLinear(10, 6, in_splits=3, out_splits=2, input_is_already_split=True, combine_out_splits=False)
    tiled.copy_params_from(plain)
    rows = torch.randn(4, 10)
    found = tiled(list(torch.split(rows, [4, 3, 3], -1)))
    assert [part.shape[-1] for part in found] == [3, 3]
    torch.testing.assert_close(torch.cat(found, -1), plain(rows))
    with pytest.raises(UsageError, match=r"in parts of \[4, 3, 3\] features; these have \[5, 5\]"):
        tiled(list(torch.split(rows, 5, -1)))


class Apart(nn.Linear):
    """Returns its bias beside the output."""

    def forward(self, rows):
        return nn.functional.linear(rows, self.weight), self.bias


@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_return_their_bias(bias):
    torch.manual_seed(0)
    plain = nn.Linear(8, 6, bias=bias)
    tiled = TiledLinearReturnBias(8, 6, bias=bias, in_splits=2, out_splits=3, linear_cls=Apart, init_linear=plain)
    rows = torch.randn(2, 8)
    found, apart = tiled(rows)
    assert (apart is None) is not bias
    torch.testing.assert_close(found + apart if bias else found, plain(rows))


def test_parts_are_as_even_as_can_be():
    assert parts_of(10, 4, "in") == [3, 3, 2, 2]
    assert parts_of(4, 4, "out") == [1, 1, 1, 1]


def test_wrong_uses():
    with pytest.raises(UsageError, match="out_splits=9: give a number from 1 to out_features=8"):
        TiledLinear(4, 8, out_splits=9)
    with pytest.raises(UsageError, match="in_splits=0: give a number from 1 to in_features=4"):
        TiledLinear(4, 8, in_splits=0)
    tiled = TiledLinear(4, 8, in_splits=2)
    with pytest.raises(UsageError, match=r"a weight of \[8, 4\]; the other layer has one of \[4, 8\]"):
        tiled.copy_params_from(nn.Linear(8, 4))
    with pytest.raises(UsageError, match="was built with bias=True; the other layer has no bias"):
        tiled.copy_params_from(nn.Linear(4, 8, bias=False))
    with pytest.raises(UsageError, match="has 4 input features; this input has 5"):
        tiled(torch.ones(2, 5))
