"""What is known of an optimizer from its class and its states."""

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, Muon, SparseAdam

from mizzen.optim.rules import ELEMENTWISE, has_stepped, is_elementwise, renew_states


def parameter(*shape):
    return nn.Parameter(torch.ones(*shape))


def step(optimizer):
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = torch.ones_like(one)
    optimizer.step()


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_elementwise_rules_do_not_see_how_a_tensor_is_cut(kind):
    """The claim behind the list: a step on two halves is the step on the whole."""
    whole = nn.Parameter(torch.linspace(-2, 2, 8))
    halves = [nn.Parameter(part.clone()) for part in whole.detach().split(5)]
    on_whole, on_halves = kind([whole], lr=0.1), kind(halves, lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        whole.grad = torch.randn(8, generator=generator)
        for half, gradient in zip(halves, whole.grad.split(5), strict=True):
            half.grad = gradient.clone()
        on_whole.step(), on_halves.step()
    assert torch.equal(whole, torch.cat([half.detach() for half in halves]))
    assert is_elementwise(on_whole)


@pytest.mark.parametrize("kind", [LBFGS, Adafactor, Muon, SparseAdam])
def test_others_are_not(kind):
    assert not is_elementwise(kind([parameter(2, 2)]))


def test_a_subclass_counts_by_the_step_it_has():
    class Renamed(AdamW):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.5)

    class Changed(Adam):
        def step(self, closure=None):
            return super().step(closure)

    class Hidden(Muon):
        pass

    for _ in range(2):  # torch wraps the step of a class when it is first instantiated
        assert is_elementwise(Renamed([parameter(2)]))
        assert not is_elementwise(Changed([parameter(2)]))
        assert not is_elementwise(Hidden([parameter(2, 2)]))


def test_a_scheduler_on_it_changes_nothing():
    optimizer = SGD([parameter(2)], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    assert is_elementwise(optimizer)


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_having_stepped(kind):
    arguments = {"momentum": 0.9} if kind is SGD else {}
    optimizer = kind([parameter(2)], lr=0.1, **arguments)
    assert not has_stepped(optimizer)
    step(optimizer)
    assert has_stepped(optimizer)


@pytest.mark.parametrize("fused", [True, False])
def test_states_are_made_anew_for_other_parameters(fused):
    """The engine gives an optimizer other tensors; Adagrad then has states for those that are gone, none for these."""
    reference = Adagrad([parameter(3)], lr=0.1, initial_accumulator_value=0.5, fused=fused)
    optimizer = Adagrad([parameter(5, 5)], lr=0.1, initial_accumulator_value=0.5, fused=fused)
    optimizer.param_groups[0]["params"] = [replacement := parameter(3)]
    renew_states(optimizer)
    assert list(optimizer.state) == [replacement]
    assert not has_stepped(optimizer)
    for key, value in reference.state[reference.param_groups[0]["params"][0]].items():
        made = optimizer.state[replacement][key]
        assert torch.equal(made, value) and (made.dtype, made.device) == (value.dtype, value.device)
    step(optimizer), step(reference)
    assert torch.equal(replacement, reference.param_groups[0]["params"][0])


def test_other_rules_have_none_to_make():
    optimizer = AdamW([parameter(2)])
    renew_states(optimizer)
    assert not optimizer.state
    step(optimizer)
    assert has_stepped(optimizer)
