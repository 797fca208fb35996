"""A factor that the optimizer's own kernel applies to gradients, or that is left for others to apply."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from mizzen.optim.rules import scaled

CPU = torch.device("cpu")


def step(kind, factor, *, by_kernel, **arguments):
    parameter = nn.Parameter(torch.linspace(-1, 1, 37))
    optimizer = kind([parameter], lr=0.1, fused=True, **arguments)
    for number in range(3):
        gradient = torch.randn(37, generator=torch.Generator().manual_seed(number))
        if by_kernel:
            with scaled(optimizer, factor, CPU) as rest:
                parameter.grad = gradient
                optimizer.step()
                assert rest == 1.0
        else:
            parameter.grad = gradient * factor
            optimizer.step()
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
    return parameter.detach()


@pytest.mark.parametrize("factor", [0.3, 2.0**-16, 7.0])
@pytest.mark.parametrize(("kind", "arguments"), [(AdamW, {}), (Adam, {"weight_decay": 0.1}), (SGD, {"momentum": 0.9})])
def test_the_kernel_multiplies(kind, arguments, factor):
    found = step(kind, factor, by_kernel=True, **arguments)
    torch.testing.assert_close(found, step(kind, factor, by_kernel=False, **arguments), rtol=1e-6, atol=1e-7)


class Own(AdamW):
    def step(self, closure=None):
        return None


@pytest.mark.parametrize(
    "optimizer",
    [
        AdamW([nn.Parameter(torch.ones(2))], fused=False),
        Adagrad([nn.Parameter(torch.ones(2))], fused=True),
        Own([nn.Parameter(torch.ones(2))], fused=True),
    ],
    ids=["not fused", "another rule", "a step of its own"],
)
def test_others_leave_it(optimizer):
    with scaled(optimizer, 0.5, CPU) as rest:
        assert rest == 0.5
        assert "grad_scale" not in vars(optimizer)


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_what_cannot_be_divided_by_or_need_not_be(factor):
    optimizer = AdamW([nn.Parameter(torch.ones(2))], fused=True)
    with scaled(optimizer, factor, CPU) as rest:
        assert rest == factor


def test_an_error_leaves_nothing_behind():
    optimizer = AdamW([nn.Parameter(torch.ones(2))], fused=True)
    with pytest.raises(KeyError), scaled(optimizer, 0.5, CPU):
        raise KeyError
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
