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


def recomputed():
    return Recomputed(use_reentrant=False)


def reentrant():
    return Recomputed(use_reentrant=True)


@pytest.mark.parametrize(("make", "are_right"), [(Block, True), (recomputed, False), (reentrant, False)])
def test_recomputation_is_seen_in_the_first_backward(make, are_right):
    model = model_of(make)
    halves = Halves(model, are_wanted=True)
    assert not halves.are_right
    _, loss = run(model)
    with halves.watched():
        loss.backward()
    assert halves.are_right is are_right
    with halves.watched():
        run(model)
    assert halves.are_right is are_right, "only the first one is watched"


def test_modules_of_others_are_not_watched_and_halves_that_nobody_wants_are_not_right():
    model, wanted = model_of(Block), []
    for are_wanted in (True, False):
        halves = Halves(model, are_wanted=are_wanted)
        with halves.watched():
            nn.Identity()(torch.zeros(1))
        wanted.append(halves.are_right)
    assert wanted == [True, False]


class Hooked(Block):
    """Changes the gradient of an activation, as who scales gradients does."""

    def forward(self, hidden):
        wide = self.up(hidden)
        wide.register_hook(lambda gradient: gradient * 0.5)
        return self.down(self.norm(wide[..., :4]).repeat(1, 2))


class Split(Block):
    """One node with several outputs, of which one is not used."""

    def forward(self, hidden):
        first, second, _ = (hidden * self.norm.weight).split([1, 2, 1], dim=-1)
        return super().forward(torch.cat([second, first, second[..., :1]], dim=-1))


@pytest.mark.parametrize("make", [Hooked, Split])
def test_what_stands_on_the_way_counts_once(make):
    test_the_halves_leave_what_the_whole_leaves(make)


class Beside(nn.Module):
    """Has an output that does not depend on the input, as a learned query has."""

    def __init__(self):
        super().__init__()
        self.block, self.query = Block(), nn.Parameter(torch.ones(4))

    def forward(self, hidden):
        return self.block(hidden), self.query * 2


def test_an_output_without_the_inputs_is_left_whole():
    torch.manual_seed(1)
    model, inputs = Beside(), torch.randn(2, 4, requires_grad=True)
    outputs = list(model(inputs))
    gradients = [torch.ones_like(each) for each in outputs]
    assert not SplitBackward(outputs, gradients, [inputs]).inputs()
    assert inputs.grad is None and model.query.grad is None
    torch.autograd.backward(outputs, gradients)
    assert torch.equal(model.query.grad, torch.full((4,), 2.0))


class Scale(torch.autograd.Function):
    """Computes both gradients, whichever is asked for."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden * weight

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        return gradient * weight, (gradient * hidden).sum(0)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, hidden):
        return Scale.apply(hidden, self.weight)


class ScaledByConstant(Block):
    """Such a function without weights."""

    def forward(self, hidden):
        return Scale.apply(super().forward(hidden), torch.full((4,), 2.0))


def test_functions_of_python_without_weights_are_halved():
    test_the_halves_leave_what_the_whole_leaves(ScaledByConstant)


def compiled():
    return torch.compile(Block(), backend="aot_eager")


@pytest.mark.parametrize("make", [reentrant, Scaled, compiled])
def test_what_computes_everything_at_once_is_left_whole(make):
    model = model_of(make)
    inputs, loss = run(model)
    assert not SplitBackward([loss], [None], [inputs]).inputs()
    assert all(each is None for each in gradients_of(model, inputs).values())
    loss.backward()
    assert all(torch.equal(each, whole(make)[name]) for name, each in gradients_of(model, inputs).items())
