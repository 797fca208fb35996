"""Memory that is kept for the next step, and not more of it than was in use at once."""

import re
from pathlib import Path

import pytest
import torch

from mizzen.offload.tier import HUGE_PAGE
from mizzen.parallel.zero.stock import Stock, Sums, new_block

CPU = torch.device("cpu")


def test_what_was_given_back_is_taken_again():
    stock = Stock(CPU)
    places = [
        (first := stock.take(100, torch.float32)).data_ptr(),
        (second := stock.take(300, torch.float32)).data_ptr(),
    ]
    assert places[0] != places[1]
    stock.give(first), stock.give(second)
    assert stock.take(300, torch.float32).data_ptr() == places[1]
    assert stock.take(90, torch.float32).data_ptr() == places[0]
    assert stock.take(90, torch.float32).data_ptr() not in places


def test_in_any_order_a_block_finds_its_own_size():
    stock, sizes = Stock(CPU), [50, 70, 60, 80, 70]
    taken = [stock.take(size, torch.float32) for size in sizes]
    places = {tensor.data_ptr() for tensor in taken}
    for tensor in taken:
        stock.give(tensor)
    assert {stock.take(size, torch.float32).data_ptr() for size in reversed(sizes)} == places


def test_a_larger_one_takes_the_place_of_a_smaller_one():
    stock = Stock(CPU)
    for size in (10, 20, 30):
        stock.give(stock.take(size, torch.float32))
    assert [block.numel() for block in stock._free] == [30]


def test_dtypes_are_kept_apart_and_strangers_are_left_alone():
    stock = Stock(CPU)
    stock.give(stock.take(10, torch.float32))
    stock.give(torch.empty(10))
    assert stock.take(10, torch.bfloat16).dtype == torch.bfloat16
    assert len(stock._free) == 1
    assert stock.take(0, torch.float32).numel() == 0
    assert len(stock._free) == 1


def test_a_device_keeps_its_own():
    stock = Stock(torch.device("meta"))
    tensor = stock.take(10, torch.float32)
    stock.give(tensor)
    assert tensor.is_meta and not stock._free


def test_sums_take_memory_with_the_first_gradient_and_give_it_back():
    stock = Stock(torch.device("cpu"))
    sums = Sums(stock, 5, torch.float32, padding=3)
    assert sums.is_empty
    sums.place().fill_(7)
    assert not sums.is_empty
    assert sums.read().tolist() == [7.0] * 8
    where = sums.place().data_ptr()
    sums.forget()
    assert sums.is_empty
    assert sums.place().data_ptr() == where, "the block that was given back"
    assert sums.place()[5:].tolist() == [0.0] * 3, "what the last step has left there is no padding"


def test_sums_to_which_nothing_came_are_zeros():
    stock = Stock(torch.device("cpu"))
    stock.give(stock.take(4, torch.float32).fill_(9))
    sums = Sums(stock, 4, torch.float32)
    assert sums.read().tolist() == [0.0] * 4
    assert not sums.is_empty


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without huge pages")
def test_a_large_block_on_a_cpu_is_asked_for_in_huge_pages():
    block = new_block(3 * HUGE_PAGE, torch.uint8, torch.device("cpu"))
    inside = block.data_ptr() + block.nbytes // 2
    is_here, flags = False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(found[1], 16) <= inside < int(found[2], 16)
        elif is_here and line.startswith("VmFlags:"):
            flags = line
    assert "hg" in flags.split()
