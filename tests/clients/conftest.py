"""These tests start programs of other libraries; `make test-clients` runs them, `make test` does not."""

import os

import pytest

from clients.launching import Scripts


def pytest_collection_modifyitems(items):
    if not os.environ.get("CLIENTS"):
        for item in items:
            if "/tests/clients/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="make test-clients runs it"))


@pytest.fixture(scope="session")
def scripts():
    """Ranks for the scripts of this folder."""
    scripts = Scripts()
    yield scripts
    scripts.pool.close()
