"""What every ring of tests has: ranks, as the fixture `world`."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, Final

import pytest

import breadth
from groups import stays_with
from pool import Origin, Pool, World
from zygote import reserved_port

if find_spec("hypothesis"):  # the clients' environment has none
    from hypothesis import settings

    # Property tests have a budget and no clock, and find today what they found yesterday.
    count = 30 if breadth.BREADTH == "short" else 100
    settings.register_profile("fixed", deadline=None, derandomize=True, database=None, max_examples=count)
    settings.load_profile("fixed")

gc.disable()  # until all tests are found

# Ranks have one thread each. What they are compared with must sum in the same order, and so has one thread too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch asks for the name of every peer that it connects to, also on this host, to have it in its logs. A name server
# that lets a question drop would cost five seconds each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


ORIGIN: Final = pytest.StashKey[Origin]()
MODULES: Final = pytest.StashKey[int]()


@pytest.hookimpl(optionalhook=True)  # xdist is not everywhere
def pytest_configure_node(node: Any) -> None:
    """The workers share what they fork ranks from, and it imports torch while they look for tests.

    The clients have no use for it.
    """
    if os.environ.get("CLIENTS"):
        return
    if ORIGIN not in node.config.stash:
        node.config.stash[ORIGIN] = Origin()
    node.workerinput["origin"] = node.config.stash[ORIGIN].address


def pytest_unconfigure(config: pytest.Config) -> None:
    """When the workers are gone."""
    if ORIGIN in config.stash:
        config.stash[ORIGIN].close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The short choice of the tests, unless all or the rest are asked for, or one test by its name."""
    if any("::" in argument for argument in config.args):
        return
    items[:], others = breadth.choose(items)
    if others:
        config.hook.pytest_deselected(items=others)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was found and imported stays to the end: no collection of garbage need look through it."""
    _keep(session.config)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Nor through a large package that a test has imported."""
    if len(sys.modules) > item.config.stash[MODULES] + 100:
        _keep(item.config)


def _keep(config: pytest.Config) -> None:
    gc.collect()
    gc.freeze()
    config.stash[MODULES] = len(sys.modules)


@pytest.hookimpl(optionalhook=True)  # xdist is not everywhere
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each test goes to the worker that is free; those that share a fixture of their file stay together.

    This is what `--dist loadgroup` is for, whose marks become part of names that pytest 9.2 does not let it change.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class OneByOne(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return stays_with(nodeid)

    return OneByOne(config, log)


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """The process that ranks are forked from; it starts when the first rank is asked for."""
    pool = Pool(origin=getattr(pytestconfig, "workerinput", {}).get("origin"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def world(pool: Pool) -> Callable[..., World]:
    """`world(n).run(function, *args, **kwargs)` on n ranks, joined by gloo unless `init=False`."""

    def make(size: int, *, init: bool = True, backend: str = "gloo") -> World:
        return World(pool, size, backend if init else None)

    return make


@pytest.fixture(scope="session")
def python(pool: Pool) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """`python("-m", "mizzen.cli", "plan", ..., cwd=..., env=...)`, forked from where ranks are forked from."""
    return pool.python


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else is handed while the test runs; what it starts may listen there."""
    with reserved_port() as found:
        yield found


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A test that joins a job in this process, as `initialize` does, would break one that comes after it."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        # torch gives oneDNN up for the whole process when the processor has no bf16 product, and sums in another order
        # from then on: what a test is compared with must not depend on the tests before it.
        torch.backends.mkldnn.set_flags(True)
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("this test has left a process group behind: run what joins a job on ranks, with world(1)")
