"""Host memory as a resting place: copies in and out, bytes as they are counted."""

import mmap

import pytest
import torch

from mizzen.accelerator.cpu import Cpu
from mizzen.errors import UsageError
from mizzen.offload.tier import HostTier, host_memory


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
