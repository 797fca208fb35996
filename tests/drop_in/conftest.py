"""The drop-in on the path of this process for these tests alone, and nothing of them left for others."""

import sys

import pytest
import torch

from mizzen.launcher.job import DROP_IN


@pytest.fixture(autouse=True)
def on_the_path(request):
    """Ranks put it there themselves: the process that they are forked from serves other tests, too."""
    if "world" not in request.fixturenames:
        sys.path.insert(0, str(DROP_IN))
    yield
    sys.path[:] = [path for path in sys.path if path != str(DROP_IN)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "deepspeed.finder"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
