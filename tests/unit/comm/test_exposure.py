"""Waits by axis: what is in flight, what is exposed, and nothing that waits for the device."""

import pytest

from mizzen.comm.timing import Exposure
from mizzen.monitor.report import StepReport


@pytest.fixture
def step():
    return lambda number: StepReport(step=number, applied=True)


class Device:
    """Marks at the times that a test gives; passed when it says so."""

    def __init__(self):
        self.now = self.passed = 0.0

    def event(self, *, timing=False):
        return Mark(self)


class Mark:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = self.device.now

    def query(self):
        return self.at <= self.device.passed

    def elapsed_time(self, end):
        assert self.query() and end.query()
        return end.at - self.at


def operation(exposure, device, group, begin, wait, end):
    device.now = begin
    lap = exposure.lap(group, on_device=True)
    device.now = wait
    lap.waits()
    device.now = end
    lap.stop()


def test_waits_add_up_by_axis_and_are_reported_once(step):
    device = Device()
    exposure = Exposure({"a": "dp_shard", "b": "sp"}, device)
    operation(exposure, device, "a", 0, 5, 7)
    operation(exposure, device, "b", 8, 8, 9)
    operation(exposure, device, "a", 10, 12, 13)
    operation(exposure, device, "c", 13, 13, 15)
    device.passed = 12  # the third is still under way
    assert exposure.read(step(1)) == {
        "comm_ms_dp_shard": 7.0,
        "comm_exposed_ms_dp_shard": 2.0,
        "comm_ms_sp": 1.0,
        "comm_exposed_ms_sp": 1.0,
    }
    device.passed = 15
    assert exposure.read(step(2)) == {
        "comm_ms_dp_shard": 3.0,
        "comm_exposed_ms_dp_shard": 1.0,
        "comm_ms_other": 2.0,
        "comm_exposed_ms_other": 2.0,
    }
    assert exposure.read(step(3)) == {}


def test_what_lies_on_the_host_is_timed_there(step):
    exposure = Exposure({}, Device())
    lap = exposure.lap("a", on_device=False)
    lap.waits()
    lap.stop()
    found = exposure.read(step(1))
    assert 0 <= found["comm_exposed_ms_other"] <= found["comm_ms_other"]
