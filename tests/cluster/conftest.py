"""These tests make hosts out of network namespaces; `make test-cluster` runs them, `make test` does not."""

import os
from contextlib import ExitStack

import pytest

from cluster.hosts import build, build_slurm


def pytest_collection_modifyitems(items):
    if not os.environ.get("CLUSTER"):
        for item in items:
            if "/cluster/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="make test-cluster runs it"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    with ExitStack() as stack:
        yield build(tmp_path_factory.mktemp("cluster"), stack)


@pytest.fixture(scope="session")
def slurm(cluster):
    build_slurm(cluster)
    return cluster
