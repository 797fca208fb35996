"""Times of phases are read when the device has finished with a step, and never waited for."""

from contextlib import contextmanager
from types import SimpleNamespace

from mizzen.engine.phases import Phases


class Clock:
    """A device whose marks are a millisecond apart, and that passes them when the test says so."""

    def __init__(self):
        self.made = 0
        self.passed = 0

    def event(self, *, timing=False):
        return Mark(self)


class Mark:
    def __init__(self, clock):
        self.clock = clock

    def record(self):
        self.clock.made += 1
        self.at = self.clock.made

    def query(self):
        return self.at <= self.clock.passed

    def synchronize(self):
        raise AssertionError("somebody waits")

    def elapsed_time(self, end):
        assert self.query() and end.query()
        return float(end.at - self.at)


def step(phases):
    for name in ("forward", "backward", "step"):
        with phases.phase(name):
            pass
    return phases.read()


def test_a_step_is_reported_when_the_device_is_through_with_it():
    clock = Clock()
    phases = Phases(clock)
    once = dict.fromkeys(("forward", "backward", "step"), 0.001)
    assert step(phases) == {}
    clock.passed = 5  # all of the first step but its last mark
    assert step(phases) == {}
    clock.passed = 6
    assert step(phases) == once  # the first
    clock.passed = 18
    assert step(phases) == once  # the third; the second is never asked for
    assert step(phases) == {}


def test_without_timing_there_is_none():
    assert step(Phases(None)) == {}


def test_what_goes_around_a_phase_is_told_its_name():
    seen = []

    @contextmanager
    def around(name):
        seen.append(name)
        yield
        seen.append(f"after {name}")

    with Phases(None, [around]).phase("forward"):
        seen.append(SimpleNamespace)
    assert seen == ["forward", SimpleNamespace, "after forward"]
