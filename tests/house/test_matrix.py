"""The matrix of what goes together: every yes has a parity test, and every refusal is the plan's own."""

import pytest

from breadth import BREADTH, FULL, chosen, covering
from mizzen.api import sketch_of
from mizzen.config.load import load
from mizzen.errors import PlanError
from mizzen.order import ORDER
from mizzen.plan.build import build
from mizzen.plan.matrix import (
    AXES_OF_MATRIX,
    REFUSED,
    accepted_pairs,
    combinations_of_matrix,
    ranks_of,
    refusals_of,
    render_matrix,
)
from parity import test_matrix
from parity.matrix import Model, config_of

EVERY = list(combinations_of_matrix())


def test_every_yes_has_a_parity_test():
    """Every two options meet in a case, whatever else is asked for; with FULL=1 every combination is a case."""
    cases = [case for group in test_matrix.GROUPS for case in group.values[0]]
    assert accepted_pairs(iter(cases)) == accepted_pairs()
    assert all(refusals_of(case) == () for case in cases)
    assert {case for case in EVERY if not refusals_of(case)} == set(test_matrix.ACCEPTED)
    alone = {case for group in test_matrix.GROUPS if not group.marks for case in group.values[0]}
    every = {name for pair in accepted_pairs() for name in pair}
    assert {name for case in alone for name in case} == every - {"compiled"}  # which takes long, and is in the rest


@pytest.fixture(scope="module")
def sketches():
    names = [option.name for axis in AXES_OF_MATRIX if axis.name == "tensor" for option in axis.options]
    configs = {tp: load(config_of(next(each for each in EVERY if tp in each))) for tp in names}
    return {tp: sketch_of(Model(), config) for tp, config in configs.items()}


@pytest.mark.in_parts
def test_the_plan_accepts_and_refuses_what_the_matrix_says(sketches):
    cases = chosen(EVERY, covering(EVERY, 2))
    for case in cases if FULL or BREADTH != "rest" else covering(cases, 2):
        config, told = load(config_of(case)), ()
        try:
            build(config, ranks_of(case), sketches[case[2]], ORDER)
        except PlanError as refusal:
            told = tuple(str(refusal).splitlines())
        assert sorted(told) == sorted(refusals_of(case)), case


def test_options_have_one_name_each_and_refusals_name_them():
    names = [option.name for axis in AXES_OF_MATRIX for option in axis.options]
    assert len(names) == len(set(names))
    assert {name for each in REFUSED for name in each.options} <= set(names)


def test_the_matrix_is_printed_with_every_option_and_sentence():
    printed = render_matrix()
    for axis in AXES_OF_MATRIX:
        assert all(option.name in printed for option in axis.options)
    assert all(each.sentence in printed for each in REFUSED)
    assert "816 of 1536 combinations are a yes" in printed
