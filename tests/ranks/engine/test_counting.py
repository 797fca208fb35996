"""What a step counts: micro-batches, samples, windows, and whether there was a gradient at all."""

import pytest
import torch
from torch import nn

import mizzen
from mizzen.errors import StepError, UsageError

QUIET = {"progress": {"enabled": False}}


def start(stage=0, **extra):
    """An engine of two blocks that decays its weights: a step without a gradient would move them."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 2},
        **QUIET,
    }
    return mizzen.initialize(model=model, config=config | extra)[0]


def values(engine):
    return torch.cat([mizzen.zero.safe_get_full_fp32_param(each).view(-1) for each in engine.module.parameters()])


def step_with(engine, *losses):
    for loss in losses:
        engine.backward(loss)
    return engine.step()


def without_gradient(stage, dtype):
    engine = start(stage, **({dtype: {"enabled": True, "initial_scale_power": 3, "hysteresis": 1}} if dtype else {}))
    kind = {"fp16": torch.half}.get(dtype, torch.float)
    inputs = torch.ones(2, 4, dtype=kind)
    step_with(engine, engine(inputs).float().mean())
    before, scale = values(engine), engine.loss_scale()
    other = nn.Parameter(torch.ones(()))
    report = step_with(engine, other * 2)
    kept = torch.equal(before, values(engine)) and engine.loss_scale() == scale
    mine = engine.global_rank == 1
    one_rank = step_with(engine, engine(inputs).float().mean() if mine or stage == 3 else other * 2)
    return report.applied, report.reason, kept, one_rank.applied, engine.skipped_steps, engine.optimizer.overflow


@pytest.mark.parametrize(("stage", "dtype"), [(0, ""), (1, ""), (2, ""), (3, ""), (1, "fp16")])
def test_a_step_without_any_gradient_is_skipped_and_changes_nothing(world, stage, dtype):
    for applied, reason, kept, one_rank, skipped, overflow in world(2).run(without_gradient, stage, dtype):
        assert not applied and "no gradient arrived on any rank" in reason
        assert kept and one_rank and skipped == 1 and not overflow


def never_a_gradient():
    engine = start(max_consecutive_skips=2)
    other = nn.Parameter(torch.ones(()))
    step_with(engine, other * 2)
    with pytest.raises(StepError, match="2 steps in a row were skipped.*no gradient arrived"):
        step_with(engine, other * 2)


def test_training_without_gradients_ends(world):
    world(1).run(never_a_gradient)


def unmanaged():
    """Three micro-batches, then one; rank 1 sees one less the first time."""
    engine = start(managed_gradient_accumulation=False, gradient_accumulation_steps=2)
    inputs, counts = torch.ones(2, 4), []
    for passes in (3 - engine.global_rank, 1):
        report = step_with(engine, *(engine(inputs).mean() for _ in range(passes)))
        counts.append((report.samples, engine.global_samples, engine.micro_steps))
    first, second = engine(inputs), engine(inputs)  # two forwards for one loss
    report = step_with(engine, (first + second).mean())
    return [*counts, (report.samples, engine.global_samples, engine.micro_steps)]


def test_samples_are_counted_where_the_user_says_when_to_step(world):
    first, second = world(2).run(unmanaged)
    assert first == [(10, 10, 3), (4, 14, 4), (4, 18, 5)]
    assert second == [(10, 10, 2), (4, 14, 3), (4, 18, 4)]


def forced(stage):
    """A boundary after two of four micro-batches; the window after it has four again."""
    engine = start(stage, gradient_accumulation_steps=4)
    inputs, seen = torch.ones(2, 4), []

    def micro():
        report = step_with(engine, engine(inputs).mean())
        seen.append((report.applied, report.samples, engine.micro_steps, engine.global_samples))
        return report

    micro()
    engine.set_gradient_accumulation_boundary(True)
    micro()
    engine.set_gradient_accumulation_boundary(None)
    norms = [micro().grad_norm for _ in range(4)]
    one = start(stage)
    step_with(one, one(inputs).mean() / 2)
    return seen, norms[-1], step_with(one, one(inputs).mean()).grad_norm


@pytest.mark.parametrize("stage", [0, 2])
def test_the_window_after_a_forced_boundary_is_a_whole_one(world, stage):
    for seen, norm, expected in world(2).run(forced, stage):
        assert seen == [
            (False, 0, 1, 0),
            (True, 8, 2, 8),
            *((False, 0, number, 8) for number in (3, 4, 5)),
            (True, 16, 6, 24),
        ]
        assert norm == pytest.approx(expected, rel=1e-4)


def driven():
    """As Accelerate drives it: `step` is called at the boundary only."""
    engine = start(gradient_accumulation_steps=2)
    inputs, samples = torch.ones(2, 4), []
    for micros in (2, 2, 1):
        for number in range(micros):
            engine.set_gradient_accumulation_boundary(number == micros - 1)
            engine.backward(engine(inputs).mean())
        samples.append(engine.step().samples)
    return samples, engine.micro_steps, engine.global_samples


def test_samples_are_counted_where_steps_are_called_at_boundaries_only(world):
    assert world(2).run(driven) == [([8, 8, 4], 5, 20)] * 2


def resize():
    engine = start(gradient_accumulation_steps=2)
    inputs = torch.ones(2, 4)
    step_with(engine, engine(inputs).mean())
    for change in (lambda: engine.set_train_batch_size(2), lambda: engine.set_train_micro_batch_size(1)):
        with pytest.raises(UsageError, match="in the middle of an accumulation"):
            change()
    step_with(engine, engine(inputs).mean())
    engine.set_train_batch_size(6)  # three of two
    applied = [step_with(engine, engine(inputs).mean()).applied for _ in range(6)]
    return applied, engine.global_samples, engine.micro_steps


def test_windows_after_another_batch_size_are_whole_ones(world):
    applied = [False, False, True, False, False, True]
    assert world(1).run(resize) == [(applied, 16, 8)]


def zeroed_in_between():
    """A loop that clears gradients before each micro-batch still steps, as often as before."""
    engine = start(gradient_accumulation_steps=2)
    applied = []
    for _ in range(4):
        engine.zero_grad()
        applied.append(step_with(engine, engine(torch.ones(2, 4)).mean()).applied)
    return applied


def test_dropped_gradients_do_not_move_the_boundary(world):
    assert world(1).run(zeroed_in_between) == [[False, True, False, True]]
