"""These tests start programs of other libraries; `make test-clients` runs them, `make test` does not."""

import os

import pytest


def pytest_collection_modifyitems(items):
    if not os.environ.get("CLIENTS"):
        for item in items:
            if "/tests/clients/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="make test-clients runs it"))
