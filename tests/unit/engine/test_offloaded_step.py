"""What is said of a step outside the device."""

import pytest
import torch

from mizzen.ambient import AMBIENT
from mizzen.engine.offloaded_step import OffloadedStep
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
