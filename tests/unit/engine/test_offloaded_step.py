"""What is said of a step outside the device."""

import pytest
import torch

from mizzen.ambient import AMBIENT
from mizzen.engine.offloaded_step import OffloadedStep
from mizzen.engine.streamed_share import StreamedShare
from mizzen.monitor.report import StepReport


@pytest.fixture
def step():
    found = OffloadedStep(torch.optim.AdamW([torch.zeros(2, requires_grad=True)]), torch.device("cpu"), threads=3)
    yield found
    found.close()


def said(caplog):
    return [message for message in caplog.messages if "outside the device" in message]


def test_a_step_that_waits_long_is_told_once_with_what_to_change(step, monkeypatch, caplog):
    monkeypatch.setattr(AMBIENT, "warned", set())
    step._measures = {"offload_ms": 900.0, "offload_host_step_ms": 800.0}
    for number in range(3, 6):
        found = step.read(StepReport(step=number, applied=True, seconds=3.0))
        assert found == step._measures
    (message,) = said(caplog)
    assert "30% of a step" in message
    assert "0.90 of 3.00 s" in message
    for way in ("micro-batches", "offload_optimizer.ratio", "offload.device_bytes", "offload.threads"):
        assert way in message


@pytest.mark.parametrize(
    ("number", "applied", "exposed"),
    [(2, True, 900.0), (5, False, 900.0), (5, True, 590.0)],
    ids=["first", "skipped", "short"],
)
def test_other_steps_are_not(step, monkeypatch, caplog, number, applied, exposed):
    monkeypatch.setattr(AMBIENT, "warned", set())
    step._measures = {"offload_ms": exposed}
    found = step.read(StepReport(step=number, applied=applied, seconds=3.0))
    assert found == (step._measures if applied else {})
    assert said(caplog) == []


class Lot:
    """So many elements in host memory."""

    place = "host"
    is_stepped_on_host = True

    def __init__(self, size):
        self.tensors, self.rest = [torch.zeros(size)], self

    def pass_through(self, *, is_streamed):
        self.is_stepped_on_host = not is_streamed


def test_what_the_device_has_no_room_for_is_stepped_on_the_host(step, monkeypatch):
    lots = [Lot(size) for size in (10, 30, 10, 10)]
    step._split(lots, 0.9)
    assert [lot.is_stepped_on_host for lot in lots] == [False, False, False, True]
    step.share = StreamedShare(None, torch.device("cpu"), 1)
    monkeypatch.setattr(StreamedShare, "device_room", lambda self: 2 * 16 * 29)
    step._split(lots, 0.9)
    assert [lot.is_stepped_on_host for lot in lots] == [False, True, False, False]
    assert step._ratio == 0.5  # what really passes
