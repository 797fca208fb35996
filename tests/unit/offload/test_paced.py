"""Copies that leave the way free for others: in their order, a few pieces at a time, and at once for who needs them."""

import threading
import time

import pytest
import torch

from mizzen.accelerator.cpu import Cpu
from mizzen.offload import paced
from mizzen.offload.paced import Pacer


class Landing:
    """A piece that is over when the test says so."""

    def __init__(self, log, into, source):
        into.copy_(source)
        self.log = log
        self.done = log.open

    @property
    def is_over(self):
        return self.done.is_set()

    def wait(self):
        self.log.open.set()

    def wait_on_stream(self, stream=None):
        self.log.streams.append(stream)


class Log:
    """What was started, in which order."""

    def __init__(self):
        self.sizes, self.streams, self.open = [], [], threading.Event()

    def copy(self, into, source):
        landing = Landing(self, into, source)
        self.sizes.append(into.numel())
        return landing


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def pacer(log, monkeypatch):
    monkeypatch.setattr(paced, "PIECE", 40)  # ten numbers
    accelerator = Cpu()
    found = Pacer(accelerator, accelerator.stream(), log.copy)
    yield found
    log.open.set()
    found.close()


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_few_pieces_are_under_way(pacer, log):
    place, value = torch.zeros(95), torch.arange(95.0)
    copy = pacer.add(place, value)
    until(lambda: len(log.sizes) == paced.TOGETHER)
    assert not copy.is_started and not copy.is_over
    assert torch.equal(place[:30], value[:30]) and not place[30:].any()
    log.open.set()
    until(lambda: copy.is_over)
    assert log.sizes == [10] * 9 + [5] and torch.equal(place, value)


def test_who_needs_a_copy_lets_those_before_it_start_too(pacer, log):
    places = [torch.zeros(30) for _ in range(4)]
    copies = [pacer.add(place, torch.full((30,), number + 1.0)) for number, place in enumerate(places)]
    until(lambda: len(log.sizes) == paced.TOGETHER)
    copies[2].wait_on_stream()
    assert [place[-1].item() for place in places] == [1.0, 2.0, 3.0, 0.0]
    assert log.streams == [None]
    copies[3].wait()
    assert copies[3].is_over and places[3][-1] == 4


def test_what_is_no_plain_memory_is_one_piece(pacer, log):
    place = torch.zeros(6, 20).t()
    copy = pacer.add(place, torch.ones(20, 6))
    copy.wait()
    assert log.sizes == [120] and place.all()


def test_all_that_waits_has_started_at_the_end(log, monkeypatch):
    monkeypatch.setattr(paced, "PIECE", 40)
    accelerator, before = Cpu(), threading.enumerate()
    pacer = Pacer(accelerator, accelerator.stream(), log.copy)
    place = torch.zeros(200)
    pacer.add(place, torch.ones(200))
    log.open.set()
    pacer.close()
    assert place.all()
    new = set(threading.enumerate()) - set(before)
    assert not any(thread.name.startswith("mizzen-copies") for thread in new)


def test_what_fails_in_the_thread_is_raised_to_who_needs_it(monkeypatch):
    def fail(into, source):
        raise OSError("no way")

    accelerator = Cpu()
    pacer = Pacer(accelerator, accelerator.stream(), fail)
    copy = pacer.add(torch.zeros(3), torch.ones(3))
    with pytest.raises(OSError, match="no way"):
        copy.wait()
    pacer._waiting.clear()
    pacer.close()


def test_what_is_held_back_begins_when_it_is_told_to(pacer, log):
    log.open.set()
    places = [torch.zeros(25) for _ in range(2)]
    held = pacer.hold_back(places[0], torch.ones(25))
    pacer.add(places[1], torch.ones(25)).wait()
    assert places[1].all() and not places[0].any() and not held.is_started
    pacer.begin()
    until(lambda: held.is_over)
    assert places[0].all()
    pacer.begin()  # nothing is held back any more


def test_of_what_is_held_back_some_comes_first(pacer, log):
    log.open.set()
    place = torch.zeros(1)
    copies = [pacer.hold_back(place, torch.full((1,), value), is_first=value > 1) for value in (0.5, 1.0, 2.0, 3.0)]
    for copy, left in zip(reversed(copies[2:]), (3.0, 2.0), strict=True):
        copy.wait()
        assert float(place) == left
    copies[0].wait()
    assert float(place) == 0.5


def test_who_needs_what_is_held_back_does_not_wait_for_that(pacer, log):
    places = [torch.zeros(25) for _ in range(3)]
    copies = [pacer.hold_back(place, torch.ones(25)) for place in places]
    copies[1].wait()
    assert [place.all().item() for place in places] == [True, True, False]
    pacer.start()
    assert places[2].all()
