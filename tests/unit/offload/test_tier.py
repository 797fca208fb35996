"""Host memory as a resting place: copies in and out, bytes as they are counted."""

import gc
import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from mizzen.accelerator.cpu import Cpu
from mizzen.errors import UsageError
from mizzen.offload.tier import LOCKING, LOCKING_THREAD, HostTier, StepNeeds, host_memory


class Locking(Cpu):
    """A host whose locked memory is counted."""

    def __init__(self):
        super().__init__()
        self.locked = {}

    def lock_pages(self, tensor):
        self.locked[tensor.data_ptr()] = tensor.numel()
        return lambda: self.locked.pop(tensor.data_ptr())


def test_memory_is_whole_pages_and_not_a_power_of_two():
    memory = host_memory(5 * mmap.PAGESIZE + 3)
    assert memory.numel() == 5 * mmap.PAGESIZE + 3
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    assert not memory.any()
    assert memory.untyped_storage().nbytes() == 6 * mmap.PAGESIZE


def test_what_is_written_is_read_back_and_lies_apart():
    tier, values = HostTier(Cpu()), torch.randn(3, 5)
    tier.write("a", values).wait()
    assert tier.held("a").data_ptr() != values.data_ptr()
    expected = values.clone()
    values.zero_()
    found = torch.empty(3, 5)
    tier.read("a", found).wait()
    assert torch.equal(found, expected)
    assert tier.used == mmap.PAGESIZE


def test_a_name_keeps_its_memory_until_the_tensor_is_another():
    tier = HostTier(Cpu())
    first = tier.place("a", torch.empty(4))
    assert tier.place("a", torch.empty(4)) is first
    assert tier.place("a", torch.empty(5)).numel() == 5
    with pytest.raises(UsageError, match="under 'b'"):
        tier.held("b")


def test_locked_memory_is_counted_and_unlocked():
    accelerator = Locking()
    tier = HostTier(accelerator)
    tier.place("a", torch.empty(1000))
    tier.place("b", torch.empty(10, dtype=torch.bfloat16))
    assert tier.locked == sum(accelerator.locked.values()) == 4020
    tier.drop("b")
    assert tier.locked == 4000
    tier.close()
    assert not accelerator.locked
    assert tier.used == 0
    unpinned = HostTier(accelerator, pin=False)
    unpinned.place("a", torch.empty(1000))
    assert not accelerator.locked


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads what Linux says of memory")
def test_host_memory_is_private_and_not_for_forked_processes():
    memory = host_memory(3 << 21)
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= memory.data_ptr() < high
            if inside:
                assert line.split()[1].endswith("p")
        elif inside and first == "VmFlags:":
            assert "dc" in line.split()  # what a fork does not copy
            return
    pytest.fail("the memory is not among those of this process")


def test_memory_of_a_tier_that_nobody_closed_is_unlocked():
    accelerator = Locking()
    tier = HostTier(accelerator)
    tier.place("a", torch.zeros(100))
    assert accelerator.locked
    del tier
    gc.collect()
    assert not accelerator.locked


def test_memory_is_locked_ahead_by_threads_and_used_when_it_is_asked_for():
    accelerator = Locking()
    tier = HostTier(accelerator)
    tier.prepare([400, 400, 800, 0])
    first, second = (tier.place(name, torch.zeros(100)) for name in "ab")
    assert first.data_ptr() != second.data_ptr() and not first.any()
    tier.place("c", torch.zeros(100))  # one more than was expected
    tier.drop_unused()
    assert sorted(accelerator.locked.values()) == [400, 400, 400]
    assert tier.locked == 1200
    tier.prepare([800])
    tier.close()
    assert not accelerator.locked


def test_memory_that_cannot_be_locked_is_an_error_where_it_is_needed():
    accelerator = Locking()

    def refuse(tensor):
        raise UsageError("no page can be locked")

    accelerator.lock_pages = refuse
    tier = HostTier(accelerator)
    tier.prepare([400, 400])
    with pytest.raises(UsageError, match="no page can be locked"):
        tier.place("a", torch.zeros(100))
    tier.close()


def test_nothing_is_made_ahead_that_is_not_locked():
    tier = HostTier(Locking(), pin=False)
    tier.prepare([400])
    tier.place("a", torch.zeros(100))
    assert tier.locked == 0 and not tier.accelerator.locked


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_who_waits_for_memory_that_nobody_will_make_makes_it():
    """One thread asks for memory that waits for its turn, while another lets go of all that was made ahead."""
    accelerator, is_free = Locking(), threading.Event()
    lock = accelerator.lock_pages

    def wait(tensor):
        if threading.current_thread().name.startswith(LOCKING_THREAD):
            assert is_free.wait(30)
        return lock(tensor)

    accelerator.lock_pages = wait
    tier = HostTier(accelerator)
    tier.prepare([400] * LOCKING + [800])
    with ThreadPoolExecutor(2) as threads:
        taken = threads.submit(tier.place, "a", torch.zeros(200))
        until(lambda: not tier._ahead._coming[800])
        closed = threads.submit(tier.drop_unused)
        assert taken.result(30).shape == (200,)
        assert not closed.done()
        is_free.set()
        closed.result(30)
    assert list(accelerator.locked.values()) == [800]
    tier.close()
    assert not accelerator.locked


def test_the_collector_may_let_go_of_memory_in_a_thread_that_makes_it():
    accelerator, said = Locking(), []
    tier = HostTier(accelerator)
    lock = accelerator.lock_pages

    def closing(tensor):
        tier.close()
        said.append("closed")
        unlock = lock(tensor)
        return lambda: (unlock(), said.append("unlocked"))

    accelerator.lock_pages = closing
    tier.prepare([400])
    until(lambda: "unlocked" in said)
    assert said == ["closed", "unlocked"]
    assert not accelerator.locked


def test_what_is_brought_later_comes_a_few_at_a_time():
    started = []
    tier = HostTier(Cpu())
    start = partial(partial, started.append)
    tier.bring_later(start("a"), [start("b"), start("c")])
    tier.bring_later(start("d"), [start("e")])
    assert started == []
    tier.bring_next()
    assert started == ["d", "a"]  # the first of each, the last lot's before all others
    for _ in range(5):  # nothing waits in the end: this is not saved up
        tier.bring_next()
    assert started == ["d", "a", "b", "c", "e"]
    tier.bring_later(start("f"), [start("g"), start("h")])
    tier.bring_next()
    assert started[5:] == ["f", "g"]
    tier.bring_no_more()
    tier.bring_next()
    assert started[5:] == ["f", "g"]


def test_room_on_a_device_is_less_what_the_next_step_takes_of_it(monkeypatch):
    monkeypatch.setattr("mizzen.offload.tier.device_room", lambda accelerator: 1000)
    needs = StepNeeds(passing=100, new_states=300)
    tier = HostTier(Cpu(), step_needs=needs)
    assert tier.takes_room(400) and not tier.takes_room(101) and tier.takes_room(100)
    needs.new_states, tier.room = 0, None
    assert tier.takes_room(800) and not tier.takes_room(1)
