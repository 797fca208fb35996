"""Recomputation and compilation on an accelerator: its own generator is rewound, its memory is spared."""

import gc

import pytest
import torch
from torch import nn

from mizzen.accelerator import get_accelerator
from mizzen.rewrite.compile import compile_blocks
from mizzen.rewrite.recompute import Keeping, Recomputed

KEEPINGS = [Keeping(products, on_host) for products in (False, True) for on_host in (False, True)]


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, *, hidden, mask):
        return hidden + self.drop(self.down(torch.relu(self.up(self.norm(hidden) * mask))))


class Model(nn.Module):
    def __init__(self, dropout: float, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(4))

    def forward(self, inputs):
        hidden, mask = self.start(inputs), torch.ones_like(inputs)
        for layer in self.layers:
            hidden = layer(hidden=hidden, mask=mask)
        return hidden.pow(2).mean()


def made(dropout: float, keeping: Keeping | None) -> Model:
    model = Model(dropout).to(get_accelerator().device())
    for layer in model.layers if keeping else ():
        vars(layer)["forward"] = Recomputed(layer.forward, keeping)
    return model


def gradients(model):
    """Two calls before one backward; all tensors of a block come by keyword."""
    torch.manual_seed(3)
    inputs = torch.randn(32, 128, 64, device=get_accelerator().device())
    loss = model(inputs) + model(inputs * 2)
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("keeping", KEEPINGS, ids=str)
def test_dropout_is_the_same_when_repeated(keeping):
    loss, expected = gradients(made(0.5, None))
    again, found = gradients(made(0.5, keeping))
    assert again == loss
    assert all(torch.allclose(one, two, rtol=1e-4, atol=1e-6) for one, two in zip(found, expected, strict=True))


def held(keeping):
    """Bytes that forward leaves on the device for backward."""
    model = made(0.1, keeping)
    inputs = torch.randn(32, 128, 64, device=get_accelerator().device())
    model(inputs).backward()
    gc.collect()
    before = get_accelerator().memory().allocated
    loss = model(inputs)
    after = get_accelerator().memory().allocated
    loss.backward()
    return after - before


def test_memory_between_forward_and_backward():
    everything, products, full, host = (
        held(keeping) for keeping in (None, Keeping(products=True), Keeping(), Keeping(on_host=True))
    )
    assert host < full < products < everything


@pytest.mark.parametrize("keeping", [None, Keeping(), Keeping(products=True)], ids=str)
def test_compiled_blocks_give_the_same_numbers(keeping):
    torch.compiler.reset()
    model = made(0.0, keeping)
    loss, expected = gradients(made(0.0, None))
    compile_blocks(model, {"backend": "inductor", "fullgraph": True})
    again, found = gradients(model)
    assert again == pytest.approx(loss, rel=1e-4)
    assert all(torch.allclose(one, two, rtol=1e-3, atol=1e-5) for one, two in zip(found, expected, strict=True))


def test_inductor_drops_in_backward_what_it_has_dropped_in_forward():
    torch.compiler.reset()

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, inputs):
            return self.drop(inputs * inputs) / 2

    block, inputs = Masked(), torch.ones(4096, device=get_accelerator().device(), requires_grad=True)
    vars(block)["forward"] = Recomputed(block.forward, Keeping())
    block.compile(fullgraph=True)
    output = block(inputs)
    output.sum().backward()
    assert torch.equal(inputs.grad, 2 * output)
    assert set(output.tolist()) == {0.0, 1.0}
