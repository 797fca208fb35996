"""Tests that need an accelerator; without one they are skipped, all of them."""

import pytest


@pytest.fixture(autouse=True)
def device():
    """The accelerator that torch has found."""
    torch = pytest.importorskip("torch")
    if not torch.accelerator.is_available():
        pytest.skip("needs an accelerator")
    return torch.accelerator.current_accelerator()
