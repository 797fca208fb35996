"""Blocks in threads: all are done, in order where that was asked for, and errors reach whoever waits."""

import gc
import threading
import weakref

import pytest

from mizzen.errors import UsageError
from mizzen.offload.transfers import MOST_THREADS, Transfers


def ours():
    return [thread for thread in threading.enumerate() if thread.name.startswith("mizzen-io")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert not ours()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 20])
def test_every_block_is_done_once(threads, count):
    pool, seen = Transfers(threads), []
    pool.start(count, seen.append).wait()
    assert sorted(seen) == list(range(count))
    pool.close()


def test_as_many_are_under_way_as_there_are_threads():
    pool, together = Transfers(4), threading.Barrier(4)
    pool.start(4, lambda _: together.wait(30)).wait()
    assert len(ours()) == 4
    pool.close()


def test_transfers_overlap_when_one_alone_leaves_threads_idle():
    pool, together = Transfers(2), threading.Barrier(2)
    begun = [pool.start(1, lambda _: together.wait(30)) for _ in range(2)]
    for transfer in begun:
        transfer.wait()
    pool.close()


def test_the_first_error_is_raised_and_no_more_blocks_begin():
    pool, seen = Transfers(1), []

    def fail(block):
        seen.append(block)
        if block == 2:
            raise ValueError("block 2")

    transfer = pool.start(9, fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="block 2"):
            transfer.wait()
    assert seen == [0, 1, 2] and transfer.is_over
    pool.start(1, seen.append).wait()  # the threads go on
    pool.close()


def test_what_comes_after_another_begins_when_that_is_over():
    pool, seen, may_end = Transfers(4), [], threading.Event()

    def first(block):
        may_end.wait(30)
        seen.append(f"first {block}")

    one = pool.start(2, first)
    two = pool.start(3, lambda block: seen.append("second"), after=one)
    none = pool.start(0, seen.append, after=two)
    other = pool.start(1, lambda _: seen.append("other"))
    other.wait()  # it does not wait for those that may not begin
    assert seen == ["other"] and not two.is_over and not none.is_over
    may_end.set()
    none.wait()
    assert sorted(seen[1:3]) == ["first 0", "first 1"] and seen[3:] == ["second"] * 3
    pool.close()


def test_what_comes_after_a_failure_fails_and_is_not_begun():
    pool, seen, may_end = Transfers(2), [], threading.Event()

    def fail(_):
        may_end.wait(30)
        raise ValueError("first")

    one = pool.start(1, fail)
    two = pool.start(3, seen.append, after=one)
    three = pool.start(3, seen.append, after=two)
    may_end.set()
    for transfer in (three, two, one):
        with pytest.raises(ValueError, match="first"):
            transfer.wait()
    assert not seen
    pool.close()


def test_closing_ends_what_is_under_way_and_fails_the_rest():
    pool, begun, may_end, seen = Transfers(1), threading.Event(), threading.Event(), []

    def slow(block):
        begun.set()
        may_end.wait(30)
        seen.append(block)

    one, two = pool.start(2, slow), pool.start(1, slow)
    begun.wait(30)
    closing = threading.Thread(target=pool.close)
    closing.start()
    with pytest.raises(UsageError, match="stopped before"):
        two.wait()
    may_end.set()
    closing.join()
    with pytest.raises(UsageError, match="stopped before"):
        one.wait()
    assert seen == [0]
    with pytest.raises(UsageError, match="nothing can be started"):
        pool.start(1, slow)
    pool.close()


def test_a_pool_that_nobody_holds_ends():
    pool = Transfers(2)
    pool.start(2, lambda _: None).wait()
    assert ours()
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None and not ours()


def test_what_a_transfer_used_is_let_go():
    class Thing:
        def use(self, _): ...

    pool, thing = Transfers(2), Thing()
    transfer, gone = pool.start(5, thing.use), weakref.ref(thing)
    transfer.wait()
    pool.close()  # a thread may still be on its way back from the last block
    del thing
    gc.collect()
    assert gone() is None and transfer.is_over


def test_threads_are_limited():
    assert Transfers(10**6).threads == MOST_THREADS
    with pytest.raises(UsageError, match="at least 1"):
        Transfers(0)
