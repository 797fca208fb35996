"""What fails in the middle leaves nothing behind, and an optimizer that could only do nothing says so."""

import gc

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import mizzen
from mizzen import zero
from ranks.parallel.zero.full.models import rows, start


def fail(*_):
    raise ValueError("in the middle of backward")


def gradients(stage, *, fails):
    engine = start("Base", stage)
    if fails:
        handle = engine.module.blocks[1].register_full_backward_hook(fail)
        with pytest.raises(ValueError, match="in the middle"):
            engine.backward(engine(rows(1, engine.global_rank)))
        handle.remove()
        if stage == 3:
            with pytest.raises(mizzen.UsageError, match="outside of a forward pass"):
                engine.module.blocks[0].up.weight.sum()
    engine.backward(engine(rows(0, engine.global_rank)))
    return [zero.safe_get_full_grad(parameter) for parameter in engine.module.parameters()]


def fail_and_go_on():
    return [
        stage
        for stage in range(4)
        if not all(map(torch.equal, gradients(stage, fails=True), gradients(stage, fails=False)))
    ]


def test_after_a_backward_that_failed_gradients_are_those_of_the_next_one(world):
    assert world(2).run(fail_and_go_on) == [[], []]


def step_a_stranger(stage):
    engine = start("Base", stage)
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
    engine.backward(engine(rows(0, engine.global_rank)))
    with pytest.raises(mizzen.UsageError, match="SGD was built on 'first.weight'"):
        optimizer.step()
    applied = engine.step().applied
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    engine.destroy()
    torch.optim.SGD(engine.module.parameters(), lr=0.1).step()
    return applied


def forget_engines():
    """An engine is collected in the middle of a step, where torch walks through its hooks."""
    hooks = _global_optimizer_pre_hooks
    before, engines = len(hooks), [start("Base", 2), start("Base", 2)]
    during = len(hooks) - before

    def forget(*_):
        engines.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(forget)
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    handle.remove()
    return during, len(hooks) - before


def test_one_hook_sees_optimizers_step_for_all_engines(world):
    assert world(2).run(forget_engines) == [(1, 1)] * 2


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_optimizer_that_was_built_too_late_does_not_step_in_silence(world, stage):
    assert world(2).run(step_a_stranger, stage) == [True, True]
