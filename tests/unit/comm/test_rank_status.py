"""What follows, for a rank that waits, from what the others have said: one case after the other, without ranks."""

from dataclasses import replace

import pytest

from mizzen.comm.rank_status import Case, GroupCalls, PeerStatus, RankStatus, TorchCall, Wait, states, verdict
from mizzen.hang import find_hang

PLACE = "call 5 of all ranks"
WAIT = Wait("0", 5, "all_reduce", PLACE, (1, 2), True)
OWN = RankStatus(0, "here:1", calls={"0": GroupCalls(5, 4), "1": GroupCalls(2, 2)}, waits=(WAIT,))


def peer(rank=1, **fields):
    return RankStatus(rank, f"here:{10 + rank}", **fields)


def judge(*peers, wait=WAIT, own=OWN, **about):
    """The verdict of rank 0 when these peers have said this; what is known about all of them besides is `about`."""
    return verdict(Case(own, wait, 30.0), {seen.rank: PeerStatus(seen, **about) for seen in peers})


def test_a_record_survives_the_store():
    calls = GroupCalls(3, 2, ((2, "barrier"), (3, "broadcast from rank 0")), 3, "ValueError: no")
    wait = Wait("tp", 3, "broadcast from rank 0", "call 3 of group 'tp'", (4, 5), False)
    sent = RankStatus(4, "m:ns:9", 17, 12.5, 3, "layers.é", "forward", {"tp": calls}, (wait,), "it ended")
    assert RankStatus.unpack(sent.pack()) == sent
    assert RankStatus.unpack(peer().pack()) == peer()


def test_a_record_stays_small():
    recent = tuple((number, "reduce_scatter_tensor") for number in range(1000, 1016))
    groups = {str(name): GroupCalls(1015, 1014, recent) for name in range(20)}
    assert len(peer(calls=groups, unit="u" * 64, phase="p" * 32).pack()) < 16384


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({}, ""),
        ({"step": 0}, "step 0"),
        ({"step": 3, "unit": "a", "phase": "b"}, "step 3, unit 'a', phase 'b'"),
        ({"phase": "evaluate"}, "phase 'evaluate'"),
    ],
)
def test_a_place_in_words(fields, place):
    assert peer(**fields).place == place


def test_no_news_is_no_reason():
    assert judge() is None
    assert judge(peer()) is None
    assert judge(peer(calls={"0": GroupCalls(4, 4)})) is None
    assert judge(peer(calls={"0": GroupCalls(5, 4, ((5, "all_reduce"),))})) is None


def test_a_peer_in_another_collective():
    seen = peer(2, calls={"0": GroupCalls(5, 4, ((4, "x"), (5, "broadcast from rank 1")))}, step=7)
    reason = (
        "rank 2 entered broadcast from rank 1 as call 5 of all ranks: the ranks have parted ways. "
        "rank 0 at all_reduce; rank 2 at step 7: broadcast from rank 1"
    )
    assert judge(peer(), seen) == reason
    later = peer(calls={"0": GroupCalls(6, 6, ((5, "barrier"), (6, "all_reduce")))})
    assert "rank 1 entered barrier" in judge(later)  # also when that one, strangely, has come to an end


def test_a_peer_that_left():
    assert judge(peer(left="its process ended")) == "rank 1 has left: its process ended"
    assert judge(peer(left="x", calls={"0": GroupCalls(5, 4)})) == "rank 1 has left: x"


def test_a_peer_that_left_after_its_part_is_not_the_reason():
    done = {"0": GroupCalls(5, 5, ((5, "all_reduce"),))}
    assert judge(peer(left="its process ended", calls=done)) is None
    assert judge(peer(calls=done), gone=True) is None
    assert judge(peer(calls=done), silence=99.0) is None


def test_a_process_that_is_gone():
    assert judge(peer(), gone=True) == "rank 1 was killed or has crashed: its process exists no more"
    assert judge(peer(left="its process ended"), gone=True) == "rank 1 has left: its process ended"


def test_a_silent_peer():
    assert judge(peer(), silence=30.0) is None
    reason = "rank 1 has not been heard of for 31 s: it is stopped, frozen or cut off"
    assert judge(peer(), silence=31.0) == reason


def test_a_peer_whose_call_failed():
    failed = peer(calls={"0": GroupCalls(5, 4, ((5, "all_reduce"),), 5, "ValueError: no")})
    assert judge(failed) == "rank 1 failed in it: ValueError: no"
    earlier = peer(calls={"0": GroupCalls(4, 3, (), 4, "ValueError: caught by the program")})
    assert judge(earlier) is None


def their_wait(group="1", number=3, peers=(0, 2), on_main=True):
    return peer(waits=(Wait(group, number, "barrier", f"call {number} of group 'tp'", peers, on_main),))


def test_a_peer_that_has_left_the_agreed_order_at_an_earlier_call():
    own = RankStatus(0, "here:10", calls={"0": GroupCalls(5, 4, ((4, "exchange"), (5, "all_reduce")))})
    case = Case(own, WAIT, 10)
    calls = GroupCalls(4, 3, ((4, "another exchange"),))
    waits = Wait("0", 4, "another exchange", "call 4 of all ranks", (0,), True)
    said = "rank 1 entered another exchange as call 4 of it: the ranks have parted ways"
    assert verdict(case, {1: PeerStatus(peer(calls={"0": calls}, waits=(waits,)))}) == said
    assert verdict(case, {1: PeerStatus(peer(calls={"0": replace(calls, failed=4)}))}) == said
    placed = replace(own, step=3, unit="a", phase="forward")
    assert verdict(replace(case, own=placed), {1: PeerStatus(peer(calls={"0": calls}, waits=(waits,), step=4))}) == (
        f"{said}. rank 0 at step 3, unit 'a', phase 'forward': exchange; rank 1 at step 4: another exchange"
    )
    assert verdict(case, {1: PeerStatus(peer(calls={"0": calls}))}) is None, "it may be on its way"
    told = replace(own, calls={"0": replace(own.calls["0"], failed=4)})
    assert verdict(replace(case, own=told), {1: PeerStatus(peer(calls={"0": replace(calls, failed=4)}))}) is None


def test_two_that_wait_for_each_other():
    reason = "rank 1 waits for rank 0 in barrier (call 3 of group 'tp'): neither can go on"
    assert judge(their_wait()) == reason
    assert judge(their_wait(group="never used")) == reason


@pytest.mark.parametrize(
    "seen",
    [
        their_wait(number=2),  # where we have been already
        their_wait(peers=(2, 3)),  # without us
        their_wait(on_main=False),  # in the background
        RankStatus(
            1, "here:11", calls={"0": GroupCalls(5, 4)}, waits=their_wait().waits
        ),  # and has come to ours as well
    ],
    ids=["done", "others", "background", "came"],
)
def test_two_that_wait_but_not_for_each_other(seen):
    assert judge(seen) is None


def test_a_wait_in_the_background_accuses_nobody_of_waiting():
    assert judge(their_wait(), wait=Wait("0", 5, "all_reduce", PLACE, (1, 2), False)) is None


def outside(operation="barrier", group="0", peers=None, is_message=False, **fields):
    return peer(torch_call=TorchCall(operation, "train.py:7", group, peers, is_message), **fields)


@pytest.mark.parametrize("seen", [outside(), outside("all_reduce", "9", (0, 1)), outside("broadcast", peers=(0,))])
def test_a_peer_in_a_call_of_the_script(seen):
    assert judge(seen, lasting=2) is None
    said = judge(seen, lasting=3)
    assert said.startswith(f"rank 1 waits for rank 0 in torch.distributed.{seen.torch_call.operation}() at train.py:7")
    assert said.endswith("neither can go on")
    assert judge(replace(seen, calls={"0": GroupCalls(5, 4)}), lasting=3) is None  # it has come to ours as well
    assert judge(seen, wait=replace(WAIT, on_main_thread=False), lasting=3) is None


@pytest.mark.parametrize(
    "seen",
    [
        outside("all_reduce", peers=(1, 2)),  # without us
        outside("broadcast", peers=(2,)),  # from another rank, that may be late
        outside("all_reduce"),  # the other half of our own
    ],
)
def test_a_call_of_the_script_that_is_no_deadlock(seen):
    assert judge(seen, lasting=99) is None


def test_a_message_of_the_script_may_be_under_way_for_long():
    seen = outside("recv", peers=(0,), is_message=True)
    assert judge(seen, lasting=29) is None
    assert "in torch.distributed.recv() at train.py:7" in judge(seen, lasting=30)


def test_a_call_of_the_script_survives_the_store():
    for sent in (outside(), outside("recv", "3", (0, 2), True)):
        assert RankStatus.unpack(sent.pack()) == sent


def test_messages_are_judged_by_presence_only():
    wait = Wait("0", 0, "recv from rank 1", "a message in all ranks", (1,), True)
    assert judge(their_wait(), wait=wait) is None
    assert judge(peer(calls={"0": GroupCalls(9, 9, ((9, "barrier"),), 9, "x")}), wait=wait) is None
    assert judge(peer(left="gone"), wait=wait) == "rank 1 has left: gone"
    assert judge(peer(2, left="gone"), wait=wait) is None  # it waits for rank 1 only


def test_the_cause_comes_before_its_consequences():
    killed, misled = peer(2), peer(1, left="its process ended with CommError: rank 2 was killed")
    seen = {1: PeerStatus(misled, gone=True), 2: PeerStatus(killed, gone=True)}
    assert verdict(Case(OWN, WAIT, 30.0), seen).startswith("rank 2 was killed")


def missing(seen, wait=WAIT):
    """What the hang detector says of the peers of rank 0, which has waited for too long."""
    own, peers = states(OWN, wait, 11.0, seen)
    hang = find_hang([own, *peers], 10.0, first_step=-1)
    return [state.rank for state in hang.missing], hang.peers_in_words


def test_who_is_waited_for_is_decided_as_the_launcher_decides_it():
    torch_call = TorchCall("barrier", "t.py:4", "0", None)
    seen = {
        1: PeerStatus(peer(calls={"0": GroupCalls(5, 4)})),
        2: PeerStatus(peer(2, calls={"0": GroupCalls(4, 4)}, step=3)),
    }
    assert missing(seen) == ([2], "rank 2 (step 3)")
    assert missing({}) == ([1, 2], "rank 1 (never heard of), rank 2 (never heard of)")
    seen[2] = PeerStatus(peer(2, torch_call=torch_call))
    assert missing(seen) == ([2], "rank 2 (alive, in torch.distributed.barrier() at t.py:4)")
    seen[2] = PeerStatus(peer(2, calls={"0": GroupCalls(9, 8)}))
    assert missing(seen) == ([], ""), "one that has gone on from the collective is not behind"
    owing = ([1, 2], "rank 1 (never heard of), rank 2 (never heard of)")
    assert missing({}, replace(WAIT, number=0)) == owing, "a message has no number, and whoever owes it is missing"
