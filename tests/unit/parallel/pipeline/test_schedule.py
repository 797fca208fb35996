"""Tables of pipelines: what they must be to be run, and the transfers that follow from them."""

import pytest

from mizzen.errors import PlanError
from mizzen.parallel.pipeline.schedule import Instruction, Receive, Schedule, Send, peak_activations, transfers
from mizzen.parallel.pipeline.tables import TABLES, make_schedule


@pytest.mark.parametrize("name", TABLES)
def test_every_schedule_can_be_run_with_few_and_odd_micro_batches(name):
    for stages in range(1, 5):
        for micros in range(1, 8):
            for forward_only in (False, True):
                made = make_schedule(name, stages, micros, forward_only=forward_only)
                assert made.is_forward_only is forward_only
                assert sum(map(len, made.rows)) >= made.chunks * micros


def test_a_custom_schedule_is_a_list_of_instructions():
    made = Schedule.of(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
    assert made.rows == make_schedule("1f1b", 2, 2).rows
    assert peak_activations(made) == (2, 1)


def test_a_table_that_stops_half_way_is_refused():
    with pytest.raises(PlanError, match="would stop half-way.*stage 0 at 0B0 for the gradient from stage 1"):
        Schedule.of(["0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"])


def test_what_a_stage_does():
    made = make_schedule("1f1b", 2, 1)
    first, second = transfers(made)
    assert [type(one) for one in first] == [Receive, Instruction, Send, Instruction]
    assert [type(one) for one in second] == [Receive, Instruction, Instruction, Send]
