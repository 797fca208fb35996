"""Ranks that wait for each other over a store in this process: threads are the ranks."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from mizzen.comm import rendezvous
from mizzen.comm.rendezvous import Members, wait_for_ranks
from mizzen.environment import World
from mizzen.errors import CommError


@pytest.fixture(autouse=True)
def haste(monkeypatch):
    monkeypatch.setattr(rendezvous, "SLICE", timedelta(seconds=0.1))
    monkeypatch.setattr(rendezvous, "OUTWAIT", 0.5)


def gather(store, *worlds, seconds=5.0, delay=0.0):
    """Let ranks come at the same time, rank 0 later by `delay`; what each got, an error included."""

    def come(world):
        time.sleep(delay if world.rank == 0 else 0)
        try:
            return wait_for_ranks(store, world, timedelta(seconds=seconds), "here:1")
        except CommError as error:
            return str(error)

    with ThreadPoolExecutor(len(worlds)) as pool:
        return list(pool.map(come, worlds))


def ranks(size):
    return [World(rank=rank, size=size) for rank in range(size)]


def test_all_come_and_get_one_fresh_name():
    store = HashStore()
    first, second = gather(store, *ranks(3)), gather(store, *ranks(3))
    assert len(set(first)) == len(set(second)) == 1
    assert first[0].name != second[0].name
    assert len(first[0].hosts) == 3 and first[0].host_count == 1


def test_a_restarted_rank_waits_for_the_new_meeting():
    # The store of torchrun's agent outlives the ranks: what the dead have left in it must not be believed.
    store = HashStore()
    before = gather(store, *ranks(2))[0]
    after = gather(store, *ranks(2), delay=0.4)
    assert after[0] == after[1] != before


def test_a_restarted_rank_is_not_told_of_an_old_failure(monkeypatch):
    monkeypatch.setattr(rendezvous, "OUTWAIT", 20.0)
    store = HashStore()
    failed = gather(store, *ranks(3)[:2], seconds=2.0)
    assert all("missing: rank 2" in text for text in failed)
    again = gather(store, *ranks(3), delay=0.4)
    assert isinstance(again[0], Members) and len(set(again)) == 1


def test_a_restart_with_fewer_ranks_is_no_contradiction():
    store = HashStore()
    gather(store, *ranks(3))
    assert isinstance(gather(store, *ranks(2), delay=0.4)[1], Members)


def test_everybody_names_the_missing(monkeypatch):
    monkeypatch.setattr(rendezvous, "OUTWAIT", 20.0)
    texts = gather(HashStore(), *[world for world in ranks(5) if world.rank not in (2, 4)], seconds=2.0)
    assert len(set(texts)) == 1
    assert "5 ranks were waited for at here:1, and 3 have come in time" in texts[0]
    assert "missing: rank 2, 4" in texts[0] and "MIZZEN_TIMEOUT" in texts[0]


def test_rank_0_is_missed_too():
    (text,) = gather(HashStore(), World(rank=1, size=2), seconds=0.2)
    assert text == "rank 1 of 2 waited for rank 0 at here:1, but it has not come: see whether it was started"


@pytest.mark.parametrize("odd", [World(rank=1, size=3), World(rank=2, size=3), World(rank=1, size=2)])
def test_different_sizes_are_named_at_once(odd):
    size = 2 if odd.size == 3 else 3
    texts = gather(HashStore(), World(rank=0, size=size), odd, seconds=10_000)  # longer than a test may take
    assert len(set(texts)) == 1
    assert f"rank 0 expects {size} ranks at here:1, but rank {odd.rank} on" in texts[0]
    assert f"expects {odd.size}: start all ranks with the same WORLD_SIZE" in texts[0]


def test_of_two_processes_with_one_rank_one_is_told():
    texts = gather(HashStore(), World(rank=0, size=2), World(rank=1, size=2), World(rank=1, size=2), seconds=2.0)
    rolls = [found for found in texts if isinstance(found, Members)]
    assert len(rolls) == 2
    (left_out,) = [found for found in texts if isinstance(found, str)]
    assert "another process has come as rank 1" in left_out


def test_local_ranks_are_counted_out_where_nobody_has_said_them():
    found = Members("x", ("a", "b", "a", "b", "b"))
    world = found.with_local_rank(World(rank=4, size=5, source="arguments"), {})
    assert (world.local_rank, world.local_size, found.host_count) == (2, 3, 2)
    said = World(rank=4, size=5, local_rank=1, source="torchrun")
    assert found.with_local_rank(said, {"LOCAL_RANK": "1"}) == said
    by_slurm = World(rank=4, size=5, local_rank=0, source="slurm")
    assert found.with_local_rank(by_slurm, {}) == by_slurm
