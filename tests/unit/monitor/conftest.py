"""Made-up steps, what was warned, and a terminal."""

import logging
import os
import pty
import sys

import pytest

from mizzen.accelerator import Memory
from mizzen.config.load import load
from mizzen.monitor.report import StepReport

GIB = 2**30


@pytest.fixture
def step():
    """`step(3, loss=2.0)` is a report of step 3, applied unless it has a reason; 8 samples, half a second."""

    def make(number, *, loss=2.5, norm=1.5, reason="", **fields):
        defaults = {"lr": (1e-3,), "samples": 8, "global_samples": 8 * number, "seconds": 0.5}
        return StepReport(
            step=number,
            applied=not reason,
            reason=reason,
            read_loss=loss if callable(loss) else lambda: loss,
            read_norm=lambda: norm,
            **defaults | fields,
        )

    return make


@pytest.fixture
def memory():
    """What a device that uses 2 of 3 GiB says."""
    return lambda: Memory(allocated=2 * GIB, reserved=3 * GIB, peak=None)


@pytest.fixture
def warned():
    """The texts that were logged as warnings."""
    texts = []

    class Keep(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    handler = Keep(level=logging.WARNING)
    logging.getLogger("mizzen").addHandler(handler)
    yield texts
    logging.getLogger("mizzen").removeHandler(handler)


@pytest.fixture
def config():
    """A configuration with the given keys."""
    return lambda **keys: load({"train_batch_size": 8} | keys)


@pytest.fixture
def terminal(monkeypatch):
    """`seen = terminal()` makes standard error a terminal 100 columns wide; `seen()` is what was written there since.

    A call, because pytest puts its own standard error in place between fixtures and test.
    """
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    stream = os.fdopen(theirs, "w")

    def read():
        stream.flush()
        text = b""
        while True:
            try:
                text += os.read(ours, 4096)
            except BlockingIOError:
                return text.decode()

    def start():
        monkeypatch.setattr(sys, "stderr", stream)
        return read

    yield start
    monkeypatch.undo()
    stream.close()
    os.close(ours)
