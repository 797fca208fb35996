"""A schedule has one owner: a second one who steps it is found out."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

from mizzen.errors import UsageError
from mizzen.optim.schedules import Stepper, WarmupLR


@pytest.fixture
def optimizer():
    return SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


def ours(optimizer):
    return WarmupLR(optimizer, warmup_num_steps=10, warmup_type="linear")


def torchs(optimizer):
    schedule = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    return schedule


@pytest.fixture(params=[ours, torchs], ids=["ours", "torch's"])
def schedule(request, optimizer):
    return request.param(optimizer)


def test_it_steps(schedule, optimizer):
    before = optimizer.param_groups[0]["lr"]
    stepper = Stepper()
    for _ in range(3):
        stepper.advance(schedule, {})
    assert optimizer.param_groups[0]["lr"] != before


def test_a_second_owner_is_refused_and_nothing_moves(schedule, optimizer):
    stepper = Stepper()
    stepper.advance(schedule, {})
    schedule.step()
    moved = optimizer.param_groups[0]["lr"]
    with pytest.raises(
        UsageError, match=r"was left at (\d+) and is now at (\d+): the engine steps it .*lr_scheduler = None"
    ):
        stepper.check(schedule, {})
    assert optimizer.param_groups[0]["lr"] == moved


def test_what_happens_before_the_first_step_is_the_users(schedule):
    schedule.load_state_dict(schedule.state_dict())
    schedule.step()
    Stepper().advance(schedule, {})


def test_loading_is_told(schedule):
    stepper = Stepper()
    stepper.advance(schedule, {})
    state = schedule.state_dict()
    stepper.advance(schedule, {})
    schedule.load_state_dict(state)
    stepper.forget()
    stepper.advance(schedule, {})


def test_another_schedule_may_take_its_place(schedule, optimizer):
    stepper = Stepper()
    stepper.advance(schedule, {})
    schedule.step()
    stepper.advance(ours(optimizer), {})


def test_arguments_reach_the_schedule(optimizer):
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    stepper = Stepper()
    for metrics in (1.0, 2.0):
        stepper.check(plateau, {"metrics": metrics})
        stepper.advance(plateau, {"metrics": metrics})
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_schedule_that_does_not_say_where_it_is():
    class Mute:
        steps = 0

        def step(self):
            self.steps += 1

    mute, stepper = Mute(), Stepper()
    stepper.advance(mute, {}), stepper.advance(mute, {})
    assert mute.steps == 2


@pytest.mark.parametrize("arguments", [{}, {"metric": 1.0}])
def test_arguments_that_a_schedule_does_not_take_are_refused_before_anything_changes(optimizer, arguments):
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(UsageError, match=r"ReduceLROnPlateau.step\(\): .*metric.*engine.step\(lr_kwargs="):
        Stepper().check(plateau, arguments)


def test_a_schedule_that_cannot_go_on_is_named(optimizer):
    short = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1)
    with pytest.raises(UsageError, match=r"schedule OneCycleLR cannot go on: ValueError: Tried to step"):
        for _ in range(3):
            optimizer.step()
            Stepper().advance(short, {})


def test_no_schedule_is_no_error():
    Stepper().check(None, {})
    Stepper().advance(None, {})
