"""What somebody does to `p.grad` before a step counts at stage 0; above it has no effect, and is told of."""

import pytest
import torch
from torch import nn

import mizzen
from mizzen.ambient import AMBIENT

RATE, STEPS = 0.1, 2


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def batch(step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def clipped(parameters):
    nn.utils.clip_grad_norm_(parameters, 0.01)


def halved(parameters):
    for parameter in parameters:
        parameter.grad = parameter.grad / 2


def taken_away(parameters):
    parameters[0].grad = None


EDITS = (clipped, halved, taken_away)


def train(stage, edit):
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
    }
    engine, *_ = mizzen.initialize(model=model(), config=config)
    parameters = list(engine.module.parameters())
    for step in range(STEPS):
        engine.backward(engine(batch(step)[engine.global_rank * 2 :][:2]).square().mean())
        edit(parameters)
        engine.step()
    return [each.detach().clone() for each in parameters]


def train_all(stage, edits):
    return [train(stage, edit) for edit in edits], [each for each in AMBIENT.warned if "grad" in each]


def plain(edit):
    made = model()
    parameters = list(made.parameters())
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        made(batch(step)).square().mean().backward()
        edit(parameters)
        optimizer.step()
    return parameters


def test_edits_count_at_stage_0(world):
    for found, warned in world(2).run(train_all, 0, EDITS):
        assert warned == []
        for edit, values in zip(EDITS, found, strict=True):
            for value, expected in zip(values, plain(edit), strict=True):
                assert torch.allclose(value, expected, atol=1e-6), edit.__name__


def assigned(parameters):
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)


def untouched(parameters):
    pass


def set_whole(parameters):
    for parameter in parameters:
        mizzen.zero.safe_set_full_grad(parameter, mizzen.zero.safe_get_full_grad(parameter))


@pytest.mark.parametrize(
    ("stage", "edit", "is_told"),
    [
        (1, clipped, True),
        (1, halved, True),
        (1, taken_away, True),
        (1, untouched, False),
        (1, set_whole, False),
        (2, assigned, True),
        (2, clipped, False),
    ],
)
def test_edits_without_effect_are_told_of_above(world, stage, edit, is_told):
    for (values,), warned in world(2).run(train_all, stage, [edit]):
        assert warned == (["grad was changed after backward"] if is_told else [])
        for value, expected in zip(values, plain(untouched), strict=True):
            torch.testing.assert_close(value, expected.detach())


def told_at_the_start(stage, **keys):
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD"}}
    mizzen.initialize(model=model(), config=config | keys)
    return [each for each in AMBIENT.warned if "clip_grad_norm_" in each]


def test_a_clipping_that_nobody_would_see_is_told_of_at_the_start(world):
    (first, *_), *_ = world(2).run(told_at_the_start, 2)
    assert "Gradients are clipped at a norm of 1, the default of gradient_clipping" in first
    assert world(2).run(told_at_the_start, 1) == [[], []]
