"""Backward in two halves: the gradients of a whole one, to the bit, and nothing is computed more often than once."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mizzen.parallel.pipeline.split import Halves, SplitBackward


class Block(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, hidden):
        Block.calls += 1
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Twice(Block):
    """Uses its weights at two places of the trunk."""

    def forward(self, hidden):
        return super().forward(super().forward(hidden))


class Recomputed(nn.Module):
    def __init__(self, *, use_reentrant):
        super().__init__()
        self.block, self.use_reentrant = Block(), use_reentrant

    def forward(self, hidden):
        return checkpoint(self.block, hidden, use_reentrant=self.use_reentrant)


def model_of(make):
    torch.manual_seed(1)
    return nn.Sequential(*(make() for _ in range(3)))


def run(model):
    """The output for an input of its own, which is returned, too."""
    inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(2), requires_grad=True)
    return inputs, model(inputs).square().sum()


def gradients_of(model, inputs):
    return {"input": inputs.grad, **{name: each.grad for name, each in model.named_parameters()}}


def whole(make):
    model = model_of(make)
    inputs, loss = run(model)
    loss.backward()
    return gradients_of(model, inputs)


@pytest.mark.parametrize("make", [Block, Twice])
def test_the_halves_leave_what_the_whole_leaves(make):
    model = model_of(make)
    inputs, loss = run(model)
    split = SplitBackward([loss], [None], [inputs])
    assert split.inputs()
    assert inputs.grad is not None and all(each.grad is None for each in model.parameters())
    split.weights()
    expected, found = whole(make), gradients_of(model, inputs)
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=0 if make is Block else 1e-6, atol=0)


def test_recomputation_is_seen_in_the_first_backward():
    def recomputed():
        return Recomputed(use_reentrant=False)

    halves, model = Halves(are_worth_it=True), model_of(recomputed)
    inputs, loss = run(model)
    Block.calls = 0
    with halves.watched():
        split = SplitBackward([loss], [None], [inputs])
        assert split.inputs()
    assert Block.calls == 3 and not halves.are_worth_it
    split.weights(at_once=not halves.are_worth_it)
    assert Block.calls == 6
    expected, found = whole(recomputed), gradients_of(model, inputs)
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_only_the_first_backward_is_watched():
    halves, model = Halves(are_worth_it=True), model_of(Block)
    for _ in range(2):
        _, loss = run(model)
        with halves.watched():
            loss.backward()
        assert halves.are_worth_it
    with halves.watched():
        run(model)
    assert halves.are_worth_it


class AtOnce(torch.autograd.Function):
    """Has the name of a compiled block's function, which does everything in one node."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden * weight

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        return gradient * weight, (gradient * hidden).sum(0)


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.function = type("CompiledFunction", (AtOnce,), {})

    def forward(self, hidden):
        return self.function.apply(hidden, self.weight)


def reentrant():
    return Recomputed(use_reentrant=True)


def compiled():
    return torch.compile(Block(), backend="aot_eager")


@pytest.mark.parametrize("make", [reentrant, Compiled, compiled])
def test_what_computes_everything_at_once_is_left_whole(make):
    model = model_of(make)
    inputs, loss = run(model)
    assert not SplitBackward([loss], [None], [inputs]).inputs()
    assert all(each is None for each in gradients_of(model, inputs).values())
    loss.backward()
    assert all(torch.equal(each, whole(make)[name]) for name, each in gradients_of(model, inputs).items())
