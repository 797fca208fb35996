"""Tables of pipelines: what they must be to be run, and the messages that follow from them."""

import random
from collections import defaultdict, deque
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from mizzen.errors import PlanError
from mizzen.parallel.pipeline.schedule import (
    BACKWARD_WEIGHT,
    FORWARD,
    Instruction,
    InstructionKind,
    Receive,
    Schedule,
    Send,
    input_of,
    output_of,
    peak_activations,
    peak_received,
    transfers,
    v_placement,
)
from mizzen.parallel.pipeline.tables import TABLES, make_schedule

ROWS = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


def run_with_values(schedule, seed, *, ahead=1):
    """What every instruction saw, when stages take turns at random and a message is met by the order of posts alone."""
    chance = random.Random(seed)
    actions = [deque(row) for row in transfers(schedule, ahead=ahead)]
    sent, posted, arrived = defaultdict(deque), defaultdict(deque), {}
    local, seen = {}, {}
    while any(actions):
        able = [stage for stage, row in enumerate(actions) if row and can_go_on(row[0], schedule, arrived)]
        assert able, "no stage can go on"
        stage = chance.choice(able)
        action = actions[stage].popleft()
        if isinstance(action, Receive):
            channel = (action.message.source, stage)
            posted[channel].append(action.message)
        elif isinstance(action, Send):
            channel = (stage, action.message.target)
            sent[channel].append((action.message, seen[made_by(action.message, schedule)]))
        elif action.kind is BACKWARD_WEIGHT:
            seen[action] = None
            continue
        else:
            needed = input_of(action, schedule.placement)
            way, step = ("forward", 1) if action.kind is FORWARD else ("backward", -1)
            value = arrived.pop(needed) if needed else local.pop((way, action.chunk, action.micro), None)
            seen[action] = (action.chunk, value)
            if output_of(action, schedule.placement) is None:
                local[way, action.chunk + step, action.micro] = seen[action]
            continue
        while sent[channel] and posted[channel]:
            message, value = sent[channel].popleft()
            assert posted[channel].popleft() == message
            arrived[message] = value
    assert not arrived and not any(sent.values()) and not any(posted.values())
    return seen


def can_go_on(action, schedule, arrived):
    needed = input_of(action, schedule.placement) if isinstance(action, Instruction) else None
    return needed is None or needed in arrived


def made_by(message, schedule):
    if message.payload == "activation":
        return Instruction(FORWARD, message.chunk - 1, message.micro)
    kinds = (InstructionKind.BACKWARD, InstructionKind.BACKWARD_INPUT)
    both = [Instruction(kind, message.chunk + 1, message.micro) for kind in kinds]
    return next(one for one in both if one in schedule.rows[message.source])


def forward_value(chunk):
    return (chunk, forward_value(chunk - 1) if chunk else None)


def backward_value(chunk, chunks):
    return (chunk, backward_value(chunk + 1, chunks) if chunk < chunks - 1 else None)


@pytest.mark.parametrize("name", TABLES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=some.data())
def test_values_reach_their_chunks_whoever_is_faster(name, data):
    stages, micros = data.draw(some.integers(1, 4)), data.draw(some.integers(1, 9))
    chunks = data.draw(some.integers(1, 3)) if TABLES[name].most_chunks is None else None
    made = make_schedule(name, stages, micros, chunks, forward_only=data.draw(some.booleans()))
    ahead, seed = data.draw(some.integers(0, 3)), data.draw(some.integers(0, 1000))
    for one, value in run_with_values(made, seed, ahead=ahead).items():
        if one.kind is FORWARD:
            assert value == forward_value(one.chunk)
        elif one.kind is not BACKWARD_WEIGHT:
            assert value == backward_value(one.chunk, made.chunks)


@pytest.mark.parametrize("name", TABLES)
def test_both_ends_post_messages_in_one_order(name):
    for stages, micros in product((2, 3, 4), (1, 3, 6)):
        made = make_schedule(name, stages, micros)
        sent, received = defaultdict(list), defaultdict(list)
        for stage, row in enumerate(transfers(made)):
            used = set()
            for number, action in enumerate(row):
                if isinstance(action, Send):
                    assert row[number - 1] == made_by(action.message, made)
                    sent[stage, action.message.target].append(action.message)
                elif isinstance(action, Receive):
                    assert action.message.target == stage
                    received[action.message.source, stage].append(action.message)
                elif needed := input_of(action, made.placement):
                    assert needed in received[needed.source, stage] and needed not in used
                    used.add(needed)
        assert sent == received


def test_what_a_stage_does():
    first, second = transfers(make_schedule("1f1b", 2, 1))
    assert [type(one) for one in first] == [Receive, Instruction, Send, Instruction]
    assert [type(one) for one in second] == [Receive, Instruction, Instruction, Send]
    assert str(second[0].message) == "activation of micro-batch 0 for chunk 1 (0 -> 1)"


def test_a_custom_schedule_is_a_list_of_instructions():
    made = Schedule.of(ROWS)
    assert made.rows == make_schedule("1f1b", 2, 2).rows
    assert peak_activations(made) == (2, 1) and peak_received(made) == (2, 1)
    assert Schedule.of([[Instruction.parse(text) for text in row.split()] for row in ROWS]) == made
    turned = Schedule.of(["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"], placement="v")
    assert turned.placement == v_placement(2, 2) == (0, 1, 1, 0)
    assert Schedule.of(["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"], placement=[0, 1, 1, 0]) == turned
    assert str(made).splitlines() == [
        "custom: 2 stages, 2 chunks, 2 micro-batches",
        "  0: 0F0 0F1 0B0 0B1",
        "  1: 1F0 1B0 1F1 1B1",
    ]


@pytest.mark.parametrize(
    ("rows", "placement", "words"),
    [
        ([], "loop", "without instructions"),
        (["0F0 0X0"], "loop", "'0X0' is no instruction: write chunk, letter and micro-batch"),
        (["0F0 0B0", "1B0 1F0"], "loop", "stage 1: 1B0 1F0 is the wrong order"),
        (["0F0 0W0 0I0"], "loop", "stage 0: 0F0 0W0 0I0 is the wrong order"),
        (["0F0 0F0 0B0"], "loop", "stage 0: 0F0 is there twice"),
        (["0F0 0F1 0B0"], "loop", "all of them, or none"),
        (["0F0 0B0", "1F0"], "loop", "all of them, or none"),
        (["0F0 0I0"], "loop", "chunk 0 has F, I of micro-batch 0"),
        (["0F0 0B0 0I0 0W0"], "loop", "chunk 0 has B, F, I, W of micro-batch 0"),
        (["0F1 0B1"], "loop", "chunk 0 has nothing of micro-batch 0"),
        (["1F0 1B0", "0F0 0B0"], "loop", "stage 0: 1F0 is of chunk 1, which stage 1 holds"),
        (["0F0 0B0", "1F0 1B0"], [0, 0], r"placement \[0, 0\] does not give 1 of 2 chunks to each"),
        (["0F0 0B0", "1F0 1B0"], "w", "placement 'w' is unknown"),
        (["0F0 3F0 3B0 0B0", "2F0 1F0 2B0 1B0"], "v", "stage 1: 2F0 comes before 1F0, whose result it takes"),
        (["0F0 3F0 3B0 0B0", "1F0 2F0 1B0 2B0"], "v", "stage 1: 1B0 comes before 2B0, whose result it takes"),
        (["0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"], "loop", "would stop half-way.*stage 0 at 0B0 for the gradient from"),
    ],
)
def test_wrong_tables_are_refused(rows, placement, words):
    with pytest.raises(PlanError, match=words):
        Schedule.of(rows, placement=placement)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"stages": 3}, "2 rows for 3 stages"),
        ({"stages": 0}, "stages is 0; it is a whole number"),
        ({"micro_batches": True}, "micro_batches is True"),
        ({"micro_batches": 1}, "0F1 is out of range: there are 2 chunks and 1 micro-batches"),
        ({"chunks_per_stage": 2}, "does not give 2 of 4 chunks"),
    ],
)
def test_numbers_that_do_not_fit_the_rows(changed, words):
    made = Schedule.of(ROWS)
    fields = {name: getattr(made, name) for name in ("name", "stages", "chunks_per_stage", "micro_batches", "rows")}
    with pytest.raises(PlanError, match=words):
        Schedule(**{**fields, "placement": made.placement, **changed})


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=some.data())
def test_a_table_that_is_accepted_runs_and_one_that_is_refused_does_not(data):
    """Rows shuffled at random: `check` says yes exactly where a run in any order of turns comes to its end."""
    rows = [data.draw(some.permutations(row.split())) for row in ROWS]
    try:
        made = Schedule.of(rows)
    except PlanError:
        orders = [[Instruction.parse(text) for text in row] for row in rows]
        assert is_out_of_order(orders) or stops(orders)
    else:
        assert len(run_with_values(made, 0)) == 8


def is_out_of_order(rows):
    return any(
        row.index(Instruction.parse(f"{stage}F{micro}")) > row.index(Instruction.parse(f"{stage}B{micro}"))
        for stage, row in enumerate(rows)
        for micro in (0, 1)
    )


def stops(rows):
    """Whether two stages that each wait for the other's instructions come to a halt."""
    done, places = set(), [0, 0]
    needs = {"1F": "0F", "0B": "1B"}
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(rows):
            while places[stage] < len(row):
                text = str(row[places[stage]])
                if text[:2] in needs and needs[text[:2]] + text[2:] not in done:
                    break
                done.add(text)
                places[stage] += 1
                moved = True
    return len(done) < 8
