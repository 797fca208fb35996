"""Schedules are pure functions of the step, equal to those that users come from, for every group."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mizzen.ambient import AMBIENT
from mizzen.errors import CheckpointError, ConfigError, UsageError
from mizzen.optim import schedules
from mizzen.optim.schedules import (
    SCHEDULES,
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from unit.optim.golden import GOLDEN, MOMENTUM, STEPS

NEEDED = {
    "LRRangeTest": {},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0},
    "WarmupLR": {},
    "WarmupDecayLR": {"total_num_steps": 50},
    "WarmupCosineLR": {"total_num_steps": 50},
}


def optimizer_with(*rates, kind=torch.optim.AdamW, **arguments):
    return kind([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], **arguments)


def make(name, optimizer, **arguments):
    return getattr(schedules, name)(optimizer, **arguments)


@pytest.mark.parametrize(("name", "arguments", "rates"), GOLDEN, ids=lambda value: value if type(value) is str else "")
def test_stepping_gives_the_rates_that_users_have(name, arguments, rates):
    optimizer = optimizer_with(0.5)
    schedule = make(name, optimizer, **arguments)
    found = {-1: optimizer.param_groups[0]["lr"]}
    for step in range(STEPS[-1] + 1):
        schedule.step()
        found[step] = optimizer.param_groups[0]["lr"]
    assert [found[step] for step in STEPS] == pytest.approx(rates, rel=1e-11)
    assert [schedule.lr_at(step)[0] for step in STEPS] == [found[step] for step in STEPS]


@pytest.mark.parametrize(("name", "arguments", "betas"), MOMENTUM)
def test_momentum_is_cycled_in_the_first_beta(name, arguments, betas):
    optimizer = optimizer_with(0.5)
    schedule = make(name, optimizer, **arguments)
    found = {-1: optimizer.param_groups[0]["betas"]}
    for step in range(STEPS[-1] + 1):
        schedule.step()
        found[step] = optimizer.param_groups[0]["betas"]
    assert [found[step][0] for step in STEPS] == pytest.approx(betas, rel=1e-11)
    assert {second for _, second in found.values()} == {0.99}
    assert schedule.get_mom() == [found[STEPS[-1]]]


def test_momentum_never_reaches_one():
    schedule = OneCycle(optimizer_with(0.5), 0.1, 1.0, cycle_first_step_size=1, decay_step_size=1, decay_mom_rate=0.5)
    assert schedule.momentum_at(1) == [0.9]
    assert [schedule.momentum_at(step) for step in (2, 3, 1000)] == [[0.999]] * 3


def test_momentum_may_be_given_for_each_group():
    groups = [{"params": [torch.ones(1)]}, {"params": [torch.ones(1)]}]
    optimizer = torch.optim.Adam(groups, lr=0.5)
    schedule = OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=2, cycle_min_mom=[0.7, 0.8])
    schedule.step()
    assert [round(group["betas"][0], 6) for group in optimizer.param_groups] == [0.8, 0.85]
    with pytest.raises(ConfigError, match="cycle_min_mom: 3 values for 2 parameter groups"):
        OneCycle(optimizer, 0.1, 1.0, cycle_min_mom=[0.7, 0.8, 0.9])


@pytest.mark.parametrize("cycles", [True, False])
def test_an_optimizer_without_betas_keeps_its_momentum(cycles, caplog):
    AMBIENT.warned.clear()
    optimizer = optimizer_with(0.1, kind=torch.optim.SGD, momentum=0.7)
    schedule = OneCycle(optimizer, 0.1, 1.0, cycle_momentum=cycles)
    schedule.step()
    assert optimizer.param_groups[0]["momentum"] == 0.7
    assert schedule.get_mom() is None
    assert any("SGD has no betas" in message for message in AMBIENT.warned) == cycles


def test_the_names():
    assert VALID_LR_SCHEDULES == ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
    assert [kind.__name__ for kind in SCHEDULES] == list(VALID_LR_SCHEDULES)


class TestWarmup:
    def test_none_starts_at_the_top(self):
        plain = WarmupLR(optimizer_with(0.5), warmup_num_steps=0)
        assert [plain.lr_at(step) for step in (-1, 0, 7)] == [[0.5]] * 3
        decaying = WarmupDecayLR(optimizer_with(0.5), 4, warmup_max_lr=0.8, warmup_num_steps=0)
        assert [decaying.lr_at(step)[0] for step in range(-1, 6)] == pytest.approx([0.8, 0.8, 0.6, 0.4, 0.2, 0, 0])
        cosine = WarmupCosineLR(optimizer_with(0.5), 2, warmup_num_steps=0, cos_min_ratio=0.0)
        assert [cosine.lr_at(step)[0] for step in range(-1, 3)] == pytest.approx([0.5, 0.25, 0, 0], abs=1e-12)

    @pytest.mark.parametrize("kind", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
    @given(steps=st.integers(0, 60), way=st.sampled_from(["log", "linear"]))
    @settings(max_examples=30)
    def test_it_never_falls_and_ends_at_the_top(self, kind, steps, way):
        needed = {} if kind is WarmupLR else {"total_num_steps": 200}
        schedule = kind(optimizer_with(1e-3), warmup_num_steps=steps, warmup_type=way, **needed)
        rates = [schedule.lr_at(step)[0] for step in range(-1, steps + (kind is WarmupLR))]
        assert rates == sorted(rates)
        assert schedule.lr_at(max(steps, 2))[0] == pytest.approx(1e-3, rel=0.02)

    def test_a_total_below_the_warm_up_is_told(self):
        AMBIENT.warned.clear()
        WarmupDecayLR(optimizer_with(0.5), 10, warmup_num_steps=20)
        assert any("total_num_steps is 10, less than warmup_num_steps = 20" in text for text in AMBIENT.warned)


class TestGroups:
    def test_each_has_its_own_rate(self):
        optimizer = optimizer_with(0.1, 0.2)
        schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
        schedule.step(2)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.1])
        assert schedule.get_lr() == schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]

    def test_arguments_may_be_given_for_each(self):
        optimizer = optimizer_with(0.1, 0.2)
        schedule = OneCycle(optimizer, [0.1, 0.2], 1.0, cycle_first_step_size=6)
        schedule.step()
        assert schedule.get_lr() == pytest.approx([0.25, 0.2 + 0.8 / 6])

    def test_as_many_values_as_groups(self):
        with pytest.raises(ConfigError, match=r"scheduler.params.warmup_min_lr: 1 values for 2 parameter groups"):
            WarmupLR(optimizer_with(0.1, 0.2), warmup_min_lr=[0.1])

    def test_a_group_added_later_is_refused(self):
        optimizer = optimizer_with(0.1)
        schedule = WarmupLR(optimizer)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(UsageError, match="has 2 parameter groups and had 1"):
            schedule.step()
        assert schedule.last_batch_iteration == -1

    def test_a_rate_that_is_a_tensor_is_written_in_place(self):
        rate = torch.tensor(0.5)
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=rate)
        held = optimizer.param_groups[0]["lr"]
        WarmupLR(optimizer, warmup_min_lr=0.25)
        assert optimizer.param_groups[0]["lr"] is held and held.item() == 0.25


class TestState:
    @pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
    def test_a_loaded_schedule_goes_on_as_the_saved_one(self, name):
        saved = make(name, optimizer_with(0.1, 0.2), **NEEDED[name])
        for _ in range(7):
            saved.step()
        optimizer = optimizer_with(0.1, 0.2)
        loaded = make(name, optimizer, **NEEDED[name])
        state = copy.deepcopy(saved.state_dict())
        assert state == {"last_batch_iteration": 6}
        loaded.load_state_dict(state)
        assert [group["lr"] for group in optimizer.param_groups] == saved.get_lr()
        for _ in range(3):
            saved.step(), loaded.step()
            assert loaded.get_lr() == saved.get_lr()

    def test_it_survives_the_optimizer_loading_its_own(self):
        optimizer = optimizer_with(0.1)
        schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
        optimizer.load_state_dict(optimizer_with(9.0).state_dict())
        schedule.step(4)
        assert optimizer.param_groups[0]["lr"] == 0.1

    def test_it_can_start_in_the_middle(self):
        optimizer = optimizer_with(0.1)
        schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear", last_batch_iteration=1)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
        schedule.step()
        assert schedule.last_batch_iteration == 2

    @pytest.mark.parametrize("state", [{}, {"last_batch_iteration": "3"}, {"last_epoch": 3}])
    def test_a_foreign_state_is_refused(self, state):
        with pytest.raises(CheckpointError, match="last_batch_iteration"):
            WarmupLR(optimizer_with(0.1)).load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("WarmupLR", {"warmup_type": "cubic"}, 'warmup_type: "cubic" is not one of'),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps: -1 is below the least allowed value, 0"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "warmup_num_steps: 2.5 is not a whole number"),
        ("WarmupLR", {"warmup_max_lr": "auto"}, 'warmup_max_lr: "auto" is not a number'),
        ("WarmupLR", {"warmup_min_lr": None}, "warmup_min_lr: null is not a number"),
        ("WarmupDecayLR", {"total_num_steps": 0}, "total_num_steps: 0 is below"),
        ("WarmupCosineLR", {"total_num_steps": "auto"}, 'total_num_steps: "auto" is not a whole number'),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size: 0 is below"),
        ("LRRangeTest", {"lr_range_test_staircase": 1}, "lr_range_test_staircase: 1 is not true or false"),
        ("OneCycle", {"cycle_first_step_size": 0}, "cycle_first_step_size: 0 is below"),
        ("OneCycle", {"cycle_second_stair_count": -2}, "cycle_second_stair_count: -2 is below"),
    ],
)
def test_arguments_that_do_not_fit(name, arguments, message):
    with pytest.raises(ConfigError, match=rf"^scheduler\.params\.{message}"):
        make(name, optimizer_with(0.1), **(NEEDED[name] | arguments))


def test_whole_numbers_may_be_written_as_floats():
    assert LRRangeTest(optimizer_with(0.1), lr_range_test_step_size=1e1).lr_range_test_step_size == 10


def test_it_needs_an_optimizer():
    with pytest.raises(UsageError, match="needs a torch optimizer; this is list"):
        WarmupLR([])
