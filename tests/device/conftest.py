"""Tests that need an accelerator; without one they are skipped, all of them."""

import pytest


@pytest.fixture(autouse=True)
def device():
    """The accelerator that torch has found. A process group that a test has made ends with the test."""
    torch = pytest.importorskip("torch")
    if not torch.accelerator.is_available():
        pytest.skip("needs an accelerator")
    yield torch.accelerator.current_accelerator()
    if torch.distributed.is_initialized():
        import mizzen.comm

        mizzen.comm.destroy_process_group()
