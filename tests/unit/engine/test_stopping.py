"""Ranks of an evaluation, as threads over one store, agree on where they stop."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torch.distributed import HashStore

from mizzen.engine import stopping
from mizzen.engine.stopping import AHEAD, EvaluationStop

SIZE = 3


def store():
    made = HashStore()
    made.set_timeout(timedelta(seconds=20))
    return made


def evaluate(talks, calls, *, together=None):
    """The call at which a rank stops; None when its evaluation comes to its end."""
    for call in range(1, calls + 1):
        if talks.is_agreed(call):
            return call
        if together is not None:
            together.wait(20)
    return None


def run(calls, *, together=None, step=5):
    shared = store()
    with ThreadPoolExecutor(len(calls)) as threads:
        ranks = [
            threads.submit(evaluate, EvaluationStop(shared, rank, len(calls), step), count, together=together)
            for rank, count in enumerate(calls)
        ]
        return [rank.result(30) for rank in ranks]


def test_ranks_that_wait_for_each_other_in_every_call_stop_at_the_same_one():
    stops = run([1000] * SIZE, together=threading.Barrier(SIZE))
    assert len(set(stops)) == 1
    assert AHEAD < stops[0] <= AHEAD + 3


def test_ranks_that_do_not_wait_for_each_other_stop_where_they_are():
    stops = run([10**9] * SIZE)
    assert all(stop > AHEAD for stop in stops)


def test_one_rank_needs_nobody():
    assert EvaluationStop(None, 0, 1, 7).is_agreed(1)


def test_a_rank_that_evaluates_alone_goes_on():
    shared = store()
    assert evaluate(EvaluationStop(shared, 0, SIZE, 5), 1000) is None


def test_it_is_called_off_when_a_rank_has_left_the_evaluation(monkeypatch):
    monkeypatch.setattr(stopping, "PATIENCE", 0.2)
    shared = store()
    stays, leaves = EvaluationStop(shared, 0, 2, 5), EvaluationStop(shared, 1, 2, 5)
    assert not leaves.is_agreed(1)  # it knows of the request, and its evaluation ends here
    assert evaluate(stays, 1000) is None
    assert not leaves.is_agreed(1000)  # a late one hears the verdict at once


def test_steps_do_not_mix():
    shared = store()
    for step in (3, 4):
        talks = [EvaluationStop(shared, rank, 2, step) for rank in range(2)]
        assert not any(talk.is_agreed(call) for call in (1, 2) for talk in talks)
        with ThreadPoolExecutor(2) as threads:
            assert all(threads.map(lambda talk: talk.is_agreed(100), talks))


def test_whoever_leaves_the_evaluation_calls_it_off():
    """Rank 0 has named a call and does not come to it; the other one waits there."""
    shared = store()
    leaves, stays = EvaluationStop(shared, 0, 2, 5), EvaluationStop(shared, 1, 2, 5)
    assert not stays.is_agreed(1) and not leaves.is_agreed(1)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(stays.is_agreed, 1000)
        leaves.cancel()
        assert waits.result(20) is False


def test_nobody_waits_for_rank_0_for_ever(monkeypatch):
    monkeypatch.setattr(stopping, "LONGEST", 0.2)
    shared = store()
    late, waits = EvaluationStop(shared, 0, 2, 5), EvaluationStop(shared, 1, 2, 5)
    assert not waits.is_agreed(1) and not late.is_agreed(1)
    assert not waits.is_agreed(1000)
    assert not late.is_agreed(1000), "the verdict was given for all"
