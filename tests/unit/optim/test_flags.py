"""Flags for schedules: one for each argument that a schedule has."""

from argparse import ArgumentParser
from dataclasses import fields

import pytest
import torch

from mizzen.optim.build import build_scheduler
from mizzen.optim.schedules import FLAGS, SCHEDULES, LRSchedule, OneCycle, add_tuning_arguments


def parse(*words):
    parser = ArgumentParser()
    assert add_tuning_arguments(parser) is parser
    return parser.parse_args(words)


def test_every_argument_of_a_schedule_has_a_flag():
    shared = {one.name for one in fields(LRSchedule)}
    arguments = {one.name for kind in SCHEDULES for one in fields(kind)} - shared
    # How long a run is comes from the run, not from a flag.
    assert {name for name, *_ in FLAGS} == arguments - {"total_num_steps"}


def test_defaults():
    found = parse()
    assert found.lr_schedule is None and found.lr_range_test_step_size == 1000
    assert (found.cycle_first_stair_count, found.cycle_momentum, found.warmup_type) == (-1, False, "log")


@pytest.mark.parametrize("kind", SCHEDULES, ids=lambda kind: kind.__name__)
def test_the_defaults_make_a_schedule(kind):
    names = {one.name for one in fields(kind)}
    given = {name: value for name, value in vars(parse()).items() if name in names}
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    length = {"total_num_steps": 2000} if "total_num_steps" in names else {}
    made = build_scheduler(kind.__name__, given | length, optimizer)
    if kind is OneCycle:
        smooth = build_scheduler(
            "OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 1000}, optimizer
        )
        assert [made.lr_at(step) for step in (0, 998, 1500)] == [smooth.lr_at(step) for step in (0, 998, 1500)]


def test_values():
    words = ["--lr_schedule", "OneCycle", "--cycle_momentum", "--cycle_min_lr", "0.5", "--cycle_first_step_size", "7"]
    found = parse(*words)
    assert (found.lr_schedule, found.cycle_momentum) == ("OneCycle", True)
    assert (found.cycle_min_lr, found.cycle_first_step_size) == (0.5, 7)


@pytest.mark.parametrize(("words", "value"), [([], True), (["true"], True), (["False"], False), (["1"], True)])
def test_a_flag_may_have_a_word(words, value):
    parser = add_tuning_arguments(ArgumentParser())
    assert parser.parse_args(["--lr_range_test_staircase", *words]).lr_range_test_staircase is value


def test_another_word_is_refused(capsys):
    with pytest.raises(SystemExit):
        add_tuning_arguments(ArgumentParser()).parse_args(["--cycle_momentum", "maybe"])
    assert "'maybe' is not true or false" in capsys.readouterr().err
