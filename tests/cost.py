"""What a test costs, in seconds of CPU: `python -m pytest -p cost --cost=FILE` writes a line for each as it ends.

A process of the tests and all below it are counted, living or reaped, so the ranks of a test are its own cost. Seconds
of a processor stay the same on a busy machine; those of a clock do not.
"""

import os
import time
from pathlib import Path

import psutil
import pytest

TICK = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser):
    parser.addoption("--cost", metavar="FILE", help="where `seconds of CPU, seconds, test` of each test are written")


def spent():
    """Seconds of CPU of this process and of those below it, with what each has reaped."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it is gone: its parent has it in its own figures
            continue
        total += sum(map(int, fields[11:15])) / TICK
    return total


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
                f"{spent() - before:.2f} {time.monotonic() - began:.2f} {getattr(item, 'seen', '')}|{item.nodeid}\n"
            )
    return result
