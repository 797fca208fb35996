"""What a hang is, and who is waited for, whoever asks."""

from mizzen.hang import NEVER, RankState, find_hang
from mizzen.progress import Record


def state(rank, *, waited=0.0, step=5, number=7, **more):
    where = {"host": "w", "step": step, "phase": "forward", "collective": "all_reduce", "number": number}
    return RankState(rank, **where, is_waiting=waited > 0, waited=waited, **more)


def test_what_a_hang_is():
    assert find_hang([state(0, waited=6), state(1)], 5)
    assert not find_hang([state(0, waited=4), state(1)], 5)
    assert not find_hang([state(0, waited=600, step=0), state(1, step=0)], 5), "a first step may take long"
    assert find_hang([state(0, waited=600, step=-1), state(1)], 5, first_step=-1), "unless the caller says otherwise"
    assert not find_hang([state(0), state(1)], 5), "nobody waits: an evaluation"
    assert not find_hang([state(0, waited=600)], 0)
    assert not find_hang([], 5)


def missing(*states):
    return [one.rank for one in find_hang(states, 5).missing]


def test_who_is_waited_for():
    assert missing(state(0, waited=6), state(1), state(2, waited=6)) == [1]
    assert missing(state(0, waited=6), state(1, waited=6, number=6)) == [1]
    assert missing(state(0, waited=6), state(1, waited=6)) == []
    assert missing(state(0, waited=6), state(1, has_ended=True)) == [1]


def test_the_verdict_in_words():
    said = str(find_hang([state(0, waited=6), state(2, waited=9), state(1)], 5))
    waits = "hung: rank 2 has waited 9.0 s in all_reduce after step 5"
    assert said == f"{waits}; rank 1 on w is not there: step 5, phase 'forward', after all_reduce"
    said = str(find_hang([state(0, waited=6), state(2, waited=9)], 5))
    assert said == f"{waits}; every rank waits, and none is behind the others"
    many = find_hang([state(0, waited=6), *(state(rank) for rank in range(1, 11))], 5)
    assert str(many).endswith(" and 2 more") and many.peers_in_words.count("rank") == 8


def test_where_a_rank_is():
    assert RankState(1, step=3, unit="block 2", phase="backward").where == "step 3, unit 'block 2', phase 'backward'"
    assert RankState(1).where == "alive" and RankState(1, step=NEVER).where == "never heard of"
    assert RankState(1, step=3, elsewhere="torch.distributed.barrier() at t.py:4").where.endswith(
        "in torch.distributed.barrier() at t.py:4"
    )
    assert RankState(1, step=3, has_ended=True).where == "step 3, has ended"


def test_a_rank_that_has_ended_waits_no_more():
    record = Record(1, 1, 2, 9, 4, True, 10.0, 0.0, "", "forward", "all_reduce", "")
    assert RankState.of(record, "w", 16.0).waited == 6.0
    ended = RankState.of(record, "w", 16.0, has_ended=True)
    assert (ended.is_waiting, ended.waited, ended.rank) == (False, 0.0, 2)
    assert RankState(**ended.as_dict()) == ended


def test_ranks_that_have_different_parts_of_a_model_are_named_with_their_roles():
    stuck = RankState(1, host="a", step=3, phase="forward", role="stage 1 of 2, tensor rank 0")
    waits = RankState(0, host="a", step=3, is_waiting=True, waited=9.0, collective="recv", role="stage 0 of 2")
    hang = find_hang([waits, stuck], 5.0)
    assert str(hang).startswith("hung: rank 0 (stage 0 of 2) has waited 9.0 s in recv")
    assert "rank 1 (stage 1 of 2, tensor rank 0) on a is not there: step 3" in str(hang)
    assert hang.peers_in_words == "rank 1 (stage 1 of 2, tensor rank 0, step 3, phase 'forward')"
