"""Attempts, ranks, and who is gone: what the first node keeps, with time as an argument."""

from dataclasses import asdict

import pytest

from mizzen.launcher.outcome import Failure
from mizzen.launcher.rendezvous_state import (
    DOUBTFUL,
    LAST_CALL,
    LOST,
    STARTING,
    STRAGGLERS,
    Heartbeats,
    NodeInfo,
    RendezvousState,
    RendezvousStatus,
    assign_ranks,
)


def want(state, *indices):
    for index in indices:
        state.join(index, asdict(NodeInfo(index, 1, f"n{index}", "10.0.0.1")))


def place(state, index, after=-1):
    """The attempt and its nodes; None while there is none."""
    found = state.assignment(index, after)
    return (found["attempt"], [node["index"] for node in found["nodes"]]) if "nodes" in found else None


def status_of(state, index):
    return RendezvousStatus.unpack(state.status(index))


def begun(least, most, *indices):
    state = RendezvousState(least, most)
    want(state, *indices)
    state.tick(LAST_CALL)
    assert place(state, indices[0]) == (0, sorted(indices))
    return state


def pass_time(state, seconds, *beating):
    """Let time pass, in small steps, while these nodes are heard of."""
    until = state.now + seconds
    while state.now < until:
        for index in beating:
            state.status(index)
        state.tick(state.now + 0.25)


def test_a_job_starts_when_all_are_there():
    state = RendezvousState(3, 3)
    want(state, 2, 0)
    state.tick(100.0)
    assert place(state, 0) is None and state.assignment(0, -1)["waiting"] == 0, "who no longer asks is forgotten"
    want(state, 2, 0, 1)
    assert place(state, 0) == place(state, 2) == (0, [0, 1, 2])


def test_an_elastic_job_waits_a_little_for_more():
    state = RendezvousState(1, 3)
    want(state, 0)
    state.tick(LAST_CALL - 0.1)
    want(state, 1)
    assert place(state, 0) is None
    state.tick(LAST_CALL)
    assert place(state, 0) == place(state, 1) == (0, [0, 1])
    want(state, 2)
    assert status_of(state, 0).has_changed and place(state, 2) is None
    want(state, 0)
    assert place(state, 0, 0) is None and status_of(state, 1).is_over, "node 1 has yet to come"
    want(state, 1)
    assert place(state, 0, 0) == place(state, 2) == (1, [0, 1, 2])


def test_a_full_job_is_not_disturbed():
    state = begun(1, 2, 0, 1)
    want(state, 2)
    assert not status_of(state, 0).has_changed
    state.disconnect(1)
    assert status_of(state, 0).has_changed
    want(state, 0)
    assert place(state, 0, 0) == (1, [0, 2])


def test_a_node_that_hangs_up_is_lost_at_once_and_no_failure_counts():
    state = begun(1, 2, 0, 1)
    state.disconnect(1)
    assert state.report_failure(0, asdict(Failure(0, "n0", -6))) is None
    status = status_of(state, 0)
    assert (status.failure, status.are_enough) == (None, True)
    assert status.gone == "node 1 (n1) is lost: its supervisor has ended without a word"
    want(state, 0)
    assert place(state, 0, 0) == (1, [0])
    counted = state.report_failure(0, asdict(Failure(0, "n0", 1)))
    assert counted["number"] == 1, "the first failure of the job"


def test_a_failure_that_was_counted_stays():
    state = begun(2, 2, 0, 1)
    assert state.report_failure(1, asdict(Failure(1, "n1", 7)))["number"] == 1
    assert state.report_failure(0, asdict(Failure(0, "n0", 1))) == asdict(Failure(1, "n1", 7)), (
        "the first is the one that counts"
    )
    state.leave(1, "rank 1 failed", False)
    assert status_of(state, 0).failure == Failure(1, "n1", 7)


@pytest.mark.parametrize(("least", "are_enough"), [(1, True), (2, False)])
def test_a_silent_node_is_in_doubt_and_then_lost(least, are_enough):
    state = begun(least, 2, 0, 1)
    status_of(state, 1)
    pass_time(state, DOUBTFUL + 1, 0)
    status = status_of(state, 0)
    assert status.is_in_doubt and not status.gone
    pass_time(state, LOST, 0)
    status = status_of(state, 0)
    assert status.gone == "node 1 (n1) is lost: its supervisor has not been heard of for 15 s"
    assert (status.are_enough, status.is_in_doubt) == (are_enough, False)


def test_a_node_that_is_silent_from_the_start_is_lost_later():
    state = begun(1, 2, 0, 1)
    pass_time(state, LOST + 1, 0)
    assert not status_of(state, 0).gone
    pass_time(state, STARTING, 0)
    assert status_of(state, 0).gone == "node 1 (n1) is lost: its supervisor has not been heard of for 120 s"


def test_a_host_that_was_held_up_accuses_nobody():
    state = begun(2, 2, 0, 1)
    status_of(state, 0), status_of(state, 1)
    state.tick(state.now + 1000.0)
    assert status_of(state, 0).gone == ""


def test_who_is_done_may_go():
    state = begun(2, 2, 0, 1)
    state.report_done(1)
    state.leave(1, "", False)
    assert status_of(state, 0).gone == "" and not status_of(state, 0).are_finished
    state.report_done(0)
    assert status_of(state, 0).are_finished


def test_a_replacement_makes_a_job_whole_again():
    state = begun(2, 2, 0, 1)
    assert state.is_taken(1)
    state.disconnect(1)
    assert not status_of(state, 0).are_enough and not state.is_taken(1)
    want(state, 1)
    assert status_of(state, 0).are_enough
    want(state, 0)
    assert place(state, 0, 0) == place(state, 1) == (1, [0, 1])


def test_a_node_that_does_not_come_is_not_waited_for_endlessly():
    state = begun(1, 2, 0, 1)
    want(state, 0)
    while state.now < LAST_CALL + STRAGGLERS - 1:
        state.status(1)
        assert place(state, 0, 0) is None
        state.tick(state.now + 0.25)
    state.tick(state.now + 2)
    assert place(state, 0, 0) == (1, [0])
    assert status_of(state, 1) == RendezvousStatus(is_over=True)
    want(state, 1)
    assert status_of(state, 0).has_changed


def test_what_nodes_share():
    state = begun(3, 3, 0, 1, 2)
    state.share(0, "k", "zero")
    state.share(2, "k", "two")
    assert state.shared(0, "k") == (False, ["zero", "two"])
    state.leave(1, "", False)
    assert state.shared(0, "k") == (True, ["zero", "two"]) and state.remaining(0) == [2]


@pytest.mark.parametrize("was_asked", [False, True])
def test_no_round_begins_without_the_first_node(was_asked):
    state = begun(1, 3, 0, 1)
    state.leave(0, "saved", was_asked)
    want(state, 1, 2)
    state.tick(1000.0)
    assert state.assignment(1, 0) == state.assignment(2, -1) == {"closed": ("saved", was_asked)}


def looks(heartbeats, beats, seconds, start=0):
    """What is found by a look in every second."""
    return [heartbeats.silent(beats(second), float(start + second)) for second in range(1, seconds + 1)]


def test_a_node_that_was_heard_of_is_lost_when_it_is_silent():
    heartbeats = Heartbeats(2, 0.0)
    found = looks(heartbeats, lambda second: [second, 1], 30)
    assert found.index([1]) == LOST + 1 and found[-1] == [1]
    assert heartbeats.silent([31, 2], 31.0) == [], "it is back"


def test_a_node_may_be_lost_before_it_is():
    heartbeats = Heartbeats(3, 0.0)
    looks(heartbeats, lambda second: [second, 1, 0], 1 + int(DOUBTFUL))
    assert heartbeats.doubtful == []
    looks(heartbeats, lambda second: [second + 10, 1, 0], 2, start=10)
    assert heartbeats.doubtful == [1], "the third, which has not yet been heard of, starts its ranks"


def test_a_node_that_starts_its_ranks_has_more_time():
    found = looks(Heartbeats(2, 0.0), lambda second: [second, 0], int(STARTING) + 5)
    assert found.index([1]) == STARTING


def test_a_machine_that_was_held_up_blames_nobody():
    heartbeats = Heartbeats(2, 0.0)
    assert heartbeats.silent([1, 1], 1.0) == []
    assert heartbeats.silent([2, 1], 1000.0) == [] and heartbeats.silent([3, 1], 2000.0) == []


def test_ranks_follow_the_order_of_the_nodes():
    members = [NodeInfo(2, 1, "c", ""), NodeInfo(0, 4, "a", ""), NodeInfo(1, 2, "b", "")]
    assert [assign_ranks(members, index) for index in (0, 1, 2)] == [(0, 0, 7), (1, 4, 7), (2, 6, 7)]
