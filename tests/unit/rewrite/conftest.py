"""What the process has for activation checkpointing, fresh for every test."""

import pytest

from mizzen.ambient import AMBIENT


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch):
    monkeypatch.setattr(AMBIENT, "checkpointing", None)
