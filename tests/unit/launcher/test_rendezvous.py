"""Rounds, and who is gone: the first node's account, with time as an argument."""

from dataclasses import asdict

import pytest

from mizzen.launcher.failure import Failure
from mizzen.launcher.place import Member
from mizzen.launcher.pulse import DOUBTFUL, LOST
from mizzen.launcher.rendezvous import LAST_CALL, STRAGGLERS, News, Rendezvous


def want(board, *indices):
    for index in indices:
        board.want(index, asdict(Member(index, 1, f"n{index}", "10.0.0.1")))


def place(board, index, after=-1):
    """The attempt and its nodes; None while there is none."""
    found = board.place(index, after)
    return (found["attempt"], [member["index"] for member in found["members"]]) if "members" in found else None


def look(board, index):
    return News.unpack(board.look(index))


def begun(least, most, *indices):
    board = Rendezvous(least, most)
    want(board, *indices)
    board.tick(LAST_CALL)
    assert place(board, indices[0]) == (0, sorted(indices))
    return board


def pass_time(board, seconds, *beating):
    """Let time pass, in small steps, while these nodes are heard of."""
    until = board.now + seconds
    while board.now < until:
        for index in beating:
            board.look(index)
        board.tick(board.now + 0.25)


def test_a_job_starts_when_all_are_there():
    board = Rendezvous(3, 3)
    want(board, 2, 0)
    board.tick(100.0)
    assert place(board, 0) is None and board.place(0, -1)["waiting"] == 0, "who no longer asks is forgotten"
    want(board, 2, 0, 1)
    assert place(board, 0) == place(board, 2) == (0, [0, 1, 2])


def test_an_elastic_job_waits_a_little_for_more():
    board = Rendezvous(1, 3)
    want(board, 0)
    board.tick(LAST_CALL - 0.1)
    want(board, 1)
    assert place(board, 0) is None
    board.tick(LAST_CALL)
    assert place(board, 0) == place(board, 1) == (0, [0, 1])
    want(board, 2)
    assert look(board, 0).has_changed and place(board, 2) is None
    want(board, 0)
    assert place(board, 0, 0) is None and look(board, 1).is_over, "node 1 has yet to come"
    want(board, 1)
    assert place(board, 0, 0) == place(board, 2) == (1, [0, 1, 2])


def test_a_full_job_is_not_disturbed():
    board = begun(1, 2, 0, 1)
    want(board, 2)
    assert not look(board, 0).has_changed
    board.hang_up(1)
    assert look(board, 0).has_changed
    want(board, 0)
    assert place(board, 0, 0) == (1, [0, 2])


def test_a_node_that_hangs_up_is_lost_at_once_and_no_failure_counts():
    board = begun(1, 2, 0, 1)
    board.hang_up(1)
    assert board.fail(0, asdict(Failure(0, "n0", -6))) is None
    news = look(board, 0)
    assert (news.failure, news.are_enough) == (None, True)
    assert news.gone == "node 1 (n1) is lost: its supervisor has ended without a word"
    want(board, 0)
    assert place(board, 0, 0) == (1, [0])
    counted = board.fail(0, asdict(Failure(0, "n0", 1)))
    assert counted["number"] == 1, "the first failure of the job"


def test_a_failure_that_was_counted_stays():
    board = begun(2, 2, 0, 1)
    assert board.fail(1, asdict(Failure(1, "n1", 7)))["number"] == 1
    assert board.fail(0, asdict(Failure(0, "n0", 1))) == asdict(Failure(1, "n1", 7)), "the first is the one that counts"
    board.leave(1, "rank 1 failed", False)
    assert look(board, 0).failure == Failure(1, "n1", 7)


@pytest.mark.parametrize(("least", "are_enough"), [(1, True), (2, False)])
def test_a_silent_node_is_in_doubt_and_then_lost(least, are_enough):
    board = begun(least, 2, 0, 1)
    look(board, 1)
    pass_time(board, DOUBTFUL + 1, 0)
    news = look(board, 0)
    assert news.is_in_doubt and not news.gone
    pass_time(board, LOST, 0)
    news = look(board, 0)
    assert news.gone == "node 1 (n1) is lost: its supervisor has not been heard of for 15 s"
    assert (news.are_enough, news.is_in_doubt) == (are_enough, False)


def test_a_host_that_was_held_up_accuses_nobody():
    board = begun(2, 2, 0, 1)
    look(board, 0), look(board, 1)
    board.tick(board.now + 1000.0)
    assert look(board, 0).gone == ""


def test_who_is_done_may_go():
    board = begun(2, 2, 0, 1)
    board.finish(1)
    board.leave(1, "", False)
    assert look(board, 0).gone == "" and not look(board, 0).are_finished
    board.finish(0)
    assert look(board, 0).are_finished


def test_a_replacement_makes_a_job_whole_again():
    board = begun(2, 2, 0, 1)
    assert board.is_taken(1)
    board.hang_up(1)
    assert not look(board, 0).are_enough and not board.is_taken(1)
    want(board, 1)
    assert look(board, 0).are_enough
    want(board, 0)
    assert place(board, 0, 0) == place(board, 1) == (1, [0, 1])


def test_a_node_that_does_not_come_is_not_waited_for_endlessly():
    board = begun(1, 2, 0, 1)
    want(board, 0)
    while board.now < LAST_CALL + STRAGGLERS - 1:
        board.look(1)
        assert place(board, 0, 0) is None
        board.tick(board.now + 0.25)
    board.tick(board.now + 2)
    assert place(board, 0, 0) == (1, [0])
    assert look(board, 1) == News(is_over=True)
    want(board, 1)
    assert look(board, 0).has_changed


def test_what_nodes_share():
    board = begun(3, 3, 0, 1, 2)
    board.share(0, "k", "zero")
    board.share(2, "k", "two")
    assert board.shared(0, "k") == (False, ["zero", "two"])
    board.leave(1, "", False)
    assert board.shared(0, "k") == (True, ["zero", "two"]) and board.others(0) == [2]


@pytest.mark.parametrize("was_asked", [False, True])
def test_no_round_begins_without_the_first_node(was_asked):
    board = begun(1, 3, 0, 1)
    board.leave(0, "saved", was_asked)
    want(board, 1, 2)
    board.tick(1000.0)
    assert board.place(1, 0) == board.place(2, -1) == {"closed": ("saved", was_asked)}
