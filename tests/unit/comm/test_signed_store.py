"""Values of the ranks' store: what somebody else has written is an error."""

from datetime import timedelta

import pytest
from torch.distributed import HashStore

from mizzen.comm.backend import SignedStore
from mizzen.comm.rendezvous import wait_for_ranks
from mizzen.environment import World
from mizzen.errors import CommError


def test_values_come_back():
    shared = HashStore()
    first, second = SignedStore(shared, b"k"), SignedStore(shared, b"k")
    first.set("a", "text")
    assert second.check(["a"]) and not second.check(["b"]) and second.get("a") == b"text"
    assert first.compare_set("v", b"", b"stop") == second.compare_set("v", b"", b"go on") == b"stop"
    assert second.compare_set("v", b"stop", b"go on") == b"go on"


def test_what_others_have_written_is_refused():
    shared = HashStore()
    ours, theirs = SignedStore(shared, b"k"), SignedStore(shared, b"j")
    ours.set("a", b"1")
    shared.set("moved", shared.get("a"))
    shared.set("forged", b"1")
    shared.set("cut", shared.get("a")[:-1])
    theirs.set("other", b"1")
    for key in ("moved", "forged", "cut", "other"):
        with pytest.raises(CommError, match=f"under {key!r} was not written by a rank of this job"):
            ours.get(key)
    with pytest.raises(CommError, match="was not written"):
        ours.compare_set("forged", b"", b"2")


def test_a_forged_offer_brings_no_rank_anywhere():
    shared = HashStore()
    shared.set("mizzen/rendezvous/offer", b'{"id": "x", "size": 2}')
    with pytest.raises(CommError, match="'offer' was not written by a rank of this job"):
        wait_for_ranks(shared, World(1, 2), timedelta(seconds=5), "here:1")
