"""Schedules by name: all of them at all small sizes, torch's own tables, and what is known of bubbles and buffers."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from mizzen.errors import PlanError
from mizzen.parallel.pipeline.schedule import BACKWARD, BACKWARD_WEIGHT, FORWARD, peak_activations, peak_received
from mizzen.parallel.pipeline.tables import TABLES, make_schedule, split_last
from mizzen.parallel.pipeline.timeline import Times, timeline

LOOPED = [name for name, table in TABLES.items() if table.most_chunks is None]


def sizes(name, stages, micros):
    """Every number of stages, micro-batches and chunks up to some."""
    for p in range(1, stages + 1):
        for m in range(1, micros + 1):
            for v in (1, 2, 3) if name in LOOPED else (None,):
                yield p, m, v


@pytest.mark.parametrize("name", TABLES)
def test_every_schedule_can_be_run_at_every_small_size(name):
    for stages, micros, chunks in sizes(name, 4, 8):
        for forward_only in (False, True):
            made = make_schedule(
                name, stages, micros, chunks, forward_only=forward_only
            )  # `check` is part of making it
            assert made.is_forward_only is forward_only
            kinds = [one.kind for row in made.rows for one in row]
            assert kinds.count(FORWARD) == made.chunks * micros
            trained = kinds.count(BACKWARD) + kinds.count(BACKWARD_WEIGHT)
            assert trained == (0 if forward_only else made.chunks * micros)


@pytest.mark.wide
@pytest.mark.parametrize("name", TABLES)
def test_every_schedule_can_be_run_at_larger_sizes(name):
    for stages, micros, chunks in sizes(name, 8, 20):
        assert make_schedule(name, stages, micros, chunks).stages == stages


@pytest.mark.parametrize("name", TABLES)
def test_gradients_are_added_up_in_the_order_of_the_data(name):
    for stages, micros, chunks in sizes(name, 4, 8):
        for row in make_schedule(name, stages, micros, chunks).rows:
            added = [one for one in row if one.kind in (BACKWARD, BACKWARD_WEIGHT)]
            for chunk in {one.chunk for one in added}:
                assert [one.micro for one in added if one.chunk == chunk] == list(range(micros))


def torch_rows(kind, stages, micros, chunks):
    """The table of one of torch's classes, made without ranks: an object with what its table is drawn from."""
    rounds = max(1, micros // stages)
    drawn = object.__new__(kind)
    drawn.__dict__.update(
        pp_group_size=stages,
        n_local_stages=chunks,
        num_stages=stages * chunks,
        _num_stages=stages * chunks,
        _stages=[SimpleNamespace()] * chunks,
        _n_microbatches=micros,
        number_of_rounds=rounds,
        microbatches_per_round=micros // rounds,
    )
    return [list(flat(drawn._calculate_single_rank_operations(stage))) for stage in range(stages)]


def flat(actions):
    for action in actions:
        if action is not None:
            for one in action.sub_actions or (action,):
                yield f"{one.stage_index}{one.computation_type.value}{one.microbatch_index}"


def texts(schedule):
    return [[str(one) for one in row] for row in schedule.rows]


@pytest.mark.parametrize(
    ("name", "kind", "chunks"),
    [
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("zero_bubble", "ScheduleInterleavedZeroBubble", 1),
        ("zero_bubble", "ScheduleInterleavedZeroBubble", 2),
        ("zbv", "ScheduleZBVZeroBubble", 2),
        ("dualpipev", "ScheduleDualPipeV", 2),
    ],
)
def test_tables_are_those_of_torch_where_it_has_one(name, kind, chunks):
    compared = 0
    for stages in range(2, 5):
        for micros in range(1, 13):
            even = micros % max(1, micros // stages) == 0 and micros >= stages
            if (name in LOOPED and not even) or (name == "dualpipev" and micros < 2 * stages):
                continue  # torch refuses those
            theirs = torch_rows(getattr(torch_schedules, kind), stages, micros, chunks)
            assert texts(make_schedule(name, stages, micros, chunks)) == theirs
            compared += 1
    assert compared >= 12


def test_looped_bfs_differs_from_torch_in_the_order_of_backwards_alone():
    for stages, micros in ((2, 3), (3, 4)):
        theirs = torch_rows(torch_schedules.ScheduleLoopedBFS, stages, micros, 2)
        for mine, other in zip(texts(make_schedule("looped_bfs", stages, micros)), theirs, strict=True):
            half = len(mine) // 2
            assert mine[:half] == other[:half] and sorted(mine[half:]) == sorted(other[half:])


def bubble(name, stages, micros, chunks=None, **times):
    return timeline(make_schedule(name, stages, micros, chunks), Times(**times)).bubble


@pytest.mark.parametrize("micros", [4, 5, 7, 8, 16])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_bubbles_are_those_of_the_papers(stages, micros):
    p, m = stages, micros
    for name in ("1f1b", "gpipe"):
        assert bubble(name, p, m) == pytest.approx((p - 1) / (m + p - 1))
    for name in ("interleaved", "looped_bfs"):
        for v in (2, 3):
            assert bubble(name, p, m, v) == pytest.approx((p - 1) / (v * m + p - 1))
    assert bubble("zero_bubble", p, m) == pytest.approx((p - 1) / (3 * m + p - 1))
    if m >= 2 * p - 1:
        assert bubble("zbv", p, m) == pytest.approx((p - 1) / (6 * m + p - 1))


@pytest.mark.parametrize("name", TABLES)
def test_the_last_backward_of_each_stage_in_halves(name):
    """Nobody keeps more for it; where every forward but the first waits for nothing, the end comes one half sooner."""
    for stages, micros, chunks in sizes(name, 4, 8):
        made = make_schedule(name, stages, micros, chunks)
        split = split_last(made)
        assert peak_activations(split) == peak_activations(made)
        assert split_last(split) == split
        whole, halves = (timeline(each, Times(forward=1, backward=2)).length for each in (made, split))
        assert halves <= whole
        if name == "1f1b" and stages > 1:
            assert whole - halves == (stages - 1 if micros == 1 else 1)
            assert [str(one) for one in split.rows[0]] == texts(made)[0]
            last = f"{stages - 1}{{}}{micros - 1}"
            assert texts(split)[-1] == [*texts(made)[-1][:-1], last.format("I"), last.format("W")]


def test_fewer_micro_batches_than_stages():
    for name in ("1f1b", "gpipe"):
        assert bubble(name, 4, 2) == pytest.approx(3 / 5)
    assert bubble("zbv", 4, 2) <= bubble("zero_bubble", 4, 2) < bubble("1f1b", 4, 2)


def test_activations_that_stages_keep():
    for p in (1, 2, 4):
        for m in (p, 2 * p, 3 * p):
            assert peak_activations(make_schedule("1f1b", p, m)) == tuple(p - stage for stage in range(p))
            assert peak_activations(make_schedule("gpipe", p, m)) == (m,) * p
            assert peak_activations(make_schedule("zero_bubble", p, m)) == (p,) * p
            assert peak_activations(make_schedule("looped_bfs", p, m)) == (2 * m,) * p
            for v in (2, 3):
                kept = tuple(min(v * m, (v - 1) * p + 2 * (p - 1 - stage) + 1) for stage in range(p))
                assert peak_activations(make_schedule("interleaved", p, m, v)) == kept
            assert peak_activations(make_schedule("1f1b", p, m, forward_only=True)) == (1,) * p
    assert peak_activations(make_schedule("zbv", 4, 8)) == (8,) * 4
    assert peak_activations(make_schedule("dualpipev", 4, 8)) == (9,) * 4
    assert peak_activations(make_schedule("1f1b", 4, 2)) == (2, 2, 2, 1)


def test_no_stage_has_more_than_three_messages_posted():
    for name in TABLES:
        for stages, micros, chunks in sizes(name, 4, 5):
            assert max(peak_received(make_schedule(name, stages, micros, chunks))) <= 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1f", 2, 4), "pipeline.schedule: '1f1f' is unknown; there are 1f1b, gpipe, interleaved"),
        (
            ("1f1b", 2, 4, 2),
            "virtual_stages is 2, but schedule '1f1b' gives every stage 1 chunk: set it to 1",
        ),
        (("gpipe", 2, 4, 3), "use one of interleaved, looped_bfs, zero_bubble"),
        (("zbv", 2, 4, 1), "virtual_stages is 1, but schedule 'zbv' gives every stage 2 chunks.*set it to 2"),
        (("dualpipev", 2, 4, 3), "virtual_stages is 3.*leave it out"),
        (("interleaved", 2, 4, 0), "virtual_stages: 0 is not a number of chunks"),
        (("1f1b", 0, 4), "0 stages are not possible"),
        (("1f1b", 2, 0), "0 micro-batches are not possible"),
        (("1f1b", 2, 2.5), "2.5 micro-batches are not possible"),
    ],
)
def test_refusals_say_what_works(arguments, words):
    with pytest.raises(PlanError, match=words):
        make_schedule(*arguments)
