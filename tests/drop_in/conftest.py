"""The drop-in on the path of this process, and of the ranks that it asks for, for these tests alone."""

import sys

import pytest

from mizzen.launcher.drop_in import FOLDER


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "deepspeed.finder"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]
