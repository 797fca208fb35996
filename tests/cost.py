"""What a test costs, in seconds of CPU: `python -m pytest -p cost --cost=FILE` writes a line for each as it ends.

A process of the tests and all below it are counted, living or reaped, and so is what it forks ranks from, which may be
below another: the ranks of a test are its own cost. Seconds of a processor stay the same on a busy machine; those of a
clock do not.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

TICK = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser):
    parser.addoption("--cost", metavar="FILE", help="where `seconds of CPU, seconds, test` of each test are written")


POOLS = []
"""The pool of this process, as soon as a test has asked for it."""


def spent():
    """Seconds of CPU of this process and of those below it, and of a zygote that is not, with what each has reaped."""
    trees = {os.getpid(): _tree(os.getpid())}
    for pool in POOLS:
        if pool.pid and pool.pid not in trees[os.getpid()]:
            trees[pool.pid] = _tree(pool.pid)
    return {root: sum(map(_own, pids)) for root, pids in trees.items()}


def _tree(pid):
    with suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def _own(pid):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it is gone: its parent has it in its own figures
        return 0.0
    return sum(map(int, fields[11:15])) / TICK


def since(before):
    """Seconds of CPU since then; of a zygote that has come since then, all."""
    return sum(max(0.0, total - before.get(pid, 0.0)) for pid, total in spent().items())


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    result = yield
    if fixturedef.argname == "pool":
        POOLS[:] = [result]
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.seen = getattr(item, "seen", "") + report.outcome[0]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    before, began = spent(), time.monotonic()
    result = yield
    target = item.config.getoption("--cost")
    if target:
        with open(target, "a") as file:
            file.write(
                f"{since(before):.2f} {time.monotonic() - began:.2f} {getattr(item, 'seen', '')}|{item.nodeid}\n"
            )
    return result
