"""When instructions run: by hand for small tables, and what must hold for all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from mizzen.errors import UsageError
from mizzen.parallel.pipeline.schedule import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Instruction, Schedule
from mizzen.parallel.pipeline.tables import TABLES, make_schedule
from mizzen.parallel.pipeline.timeline import Times, timeline


def spans(made):
    return [[(str(each.instruction), each.start, each.end) for each in row] for row in made.rows]


def test_two_stages_by_hand():
    made = timeline(make_schedule("1f1b", 2, 2), Times(forward=1, backward=2, transfer=0.5))
    assert spans(made) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 5, 7), ("0B1", 8, 10)],
        [("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5), ("1F1", 4.5, 5.5), ("1B1", 5.5, 7.5)],
    ]
    assert made.length == 10 and made.busy == (6, 6) and made.bubble == pytest.approx(8 / 20)


def test_messages_of_a_channel_follow_each_other():
    rows = ["0F0 0F1 0F2", "1F0 1F1 1F2"]
    made = timeline(Schedule.of(rows), Times(forward=1, transfer=3))
    assert [each.start for each in made.rows[1]] == [4, 7, 10]


def test_times_by_chunk():
    times = Times(forward=(1, 2), backward=(3, 4), backward_input=(1, 3))
    made = timeline(make_schedule("zero_bubble", 2, 1), times)
    assert spans(made) == [
        [("0F0", 0, 1), ("0I0", 6, 7), ("0W0", 7, 9)],
        [("1F0", 1, 3), ("1I0", 3, 6), ("1W0", 6, 7)],
    ]
    assert Times(backward=4).of(Instruction(BACKWARD_INPUT, 0, 0)) == 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=some.data())
def test_nobody_computes_twice_at_once_or_before_its_input(data):
    name = data.draw(some.sampled_from(list(TABLES)))
    made = make_schedule(name, data.draw(some.integers(1, 4)), data.draw(some.integers(1, 8)))
    long = some.floats(0.1, 5)
    forward, backward, transfer = data.draw(long), data.draw(long), data.draw(some.floats(0, 3))
    line = timeline(made, Times(forward=forward, backward=backward, transfer=transfer))
    ends = {each.instruction: each for row in line.rows for each in row}
    for row in line.rows:
        assert all(sooner.end <= later.start for sooner, later in zip(row, row[1:], strict=False))
    for one, each in ends.items():
        before = one.chunk + (-1 if one.kind is FORWARD else 1)
        if one.kind is BACKWARD_WEIGHT or not 0 <= before < made.chunks:
            continue
        kinds = [FORWARD] if one.kind is FORWARD else [kind for kind in type(FORWARD) if kind.value in "BI"]
        source = next(ends[key] for kind in kinds if (key := Instruction(kind, before, one.micro)) in ends)
        wait = 0 if made.placement[before] == made.placement[one.chunk] else transfer
        assert each.start >= source.end + wait - 1e-9
    assert 0 <= line.bubble < 1
    assert sum(line.busy) == pytest.approx(made.chunks * made.micro_batches * (forward + backward))


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (Times(forward=(1, 2, 3)), "forward has 3 times for 2 chunks"),
        (Times(forward=-1), "forward has a time below 0: -1"),
        (Times(transfer=-1), "transfer is -1"),
        (Times(backward=1, backward_input=2), "backward of chunk 0 takes 1, less than the gradient of its input alone"),
    ],
)
def test_wrong_times(times, words):
    with pytest.raises(UsageError, match=words):
        timeline(make_schedule("1f1b", 2, 2), times)
