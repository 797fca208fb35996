import re
import subprocess
import sys

import pytest

from mizzen.monitor.progress_line import ProgressLine
from mizzen.monitor.screen import Screen


@pytest.fixture
def line(memory):
    """A progress line whose clock the test turns: `line(total=...)`, then `line.now = ...`."""

    def make(**options):
        clock = lambda: make.now  # noqa: E731
        return ProgressLine(Screen(), memory, **{"interval": 1.0, "total": None, "clock": clock} | options)

    make.now = 0.0
    return make


def drawn(text):
    """The lines as one sees them: without colours, each drawing of its own."""
    plain = re.sub(r"\x1b\[[0-9;]*[mK]", "", text)
    return [part for part in re.split(r"[\r\n]+", plain) if part]


def test_it_shows_step_loss_rate_speed_and_memory(line, terminal, step):
    seen = terminal()
    shown = line()
    shown.on_step(step(1, tokens=2048, seconds=30.0))
    line.now = 5.0
    shown.on_step(step(2, tokens=2048, loss=2.25, seconds=0.5))
    assert drawn(seen()) == [
        "step 1  loss 2.5000  lr 0.001  2.00 GiB",
        "step 2  loss 2.2500  lr 0.001  4,096 tokens/s  2.00 GiB",
    ]


def test_it_is_drawn_and_the_loss_is_read_at_most_once_per_interval(line, terminal, step):
    seen = terminal()
    reads = []
    shown = line(interval=1.0)
    for number in range(1, 11):
        line.now = number * 0.4
        shown.on_step(step(number, loss=lambda number=number: reads.append(number) or 1.0))
    assert reads == [1, 4, 7, 10]
    assert [each.split()[1] for each in drawn(seen())] == ["1", "4", "7", "10"]


def test_the_last_step_is_always_drawn(line, terminal, step):
    seen = terminal()
    shown = line(total=3)
    for number in range(1, 4):
        shown.on_step(step(number))
        line.now = 0.1
    assert [each.split()[1] for each in drawn(seen())] == ["1/3", "3/3"]


def test_the_time_left_where_the_number_of_steps_is_known(line, terminal, step):
    seen = terminal()
    shown = line(total=100)
    for number in range(1, 4):
        line.now = float(number)
        shown.on_step(step(number, seconds=600.0 if number == 1 else 2.0))
    first, *others = drawn(seen())
    assert first.startswith("step 1/100 ") and "left" not in first
    assert [each.rsplit("  ", 1)[1] for each in others] == ["0:03:16 left", "0:03:14 left"]


def test_one_slow_step_does_not_decide_the_time_left(line, terminal, step):
    seen = terminal()
    shown = line(total=1000)
    for number in range(1, 20):
        line.now = float(number)
        shown.on_step(step(number, seconds=100.0 if number == 19 else 1.0))
    assert drawn(seen())[-1].endswith("2:58:13 left")  # 981 steps of 10.9 s, not of 100 s


def test_a_step_beyond_the_last_and_a_run_without_rates(line, terminal, step):
    seen = terminal()
    shown = line(total=2, has_rate=False)
    for number in range(1, 4):
        line.now = float(number)
        shown.on_step(step(number, loss=None, lr=()))
    assert drawn(seen())[-1] == "step 3/2  2.00 GiB  0:00:00 left"


def test_a_skipped_step_is_not_drawn(line, terminal, step):
    seen = terminal()
    shown = line()
    shown.on_step(step(1, reason="step 2: not finite", loss=lambda: pytest.fail("read")))
    assert seen() == ""


def test_the_last_line_stays(line, terminal, step):
    seen = terminal()
    shown = line()
    shown.on_step(step(1))
    shown.close()
    shown.close()
    assert seen().endswith("2.00 GiB\r\r\n")


ENDS = """
from mizzen.accelerator import Memory
from mizzen.monitor.progress_line import ProgressLine
from mizzen.monitor.report import StepReport
from mizzen.monitor.screen import Screen
line = ProgressLine(Screen(), lambda: Memory(0, 0, 0), interval=1.0, total=None)
line.on_step(StepReport(step=1, applied=True))
"""


def test_it_stays_also_when_a_program_just_ends(terminal):
    seen = terminal()
    environment = {"PYTHONPATH": ":".join(sys.path), "TERM": "xterm", "COLUMNS": "100"}
    subprocess.run([sys.executable, "-c", ENDS], stderr=sys.stderr, env=environment, check=True)
    assert seen().endswith("0.00 GiB\r\r\n")


def test_the_share_of_the_device_is_shown_where_it_is_known(line, terminal, step):
    seen = terminal()
    shown = line(total=2)
    shown.on_step(step(1))
    shown.on_step(step(2, tokens=2048, measures={"mfu": 0.4123}))
    assert drawn(seen())[-1].startswith("step 2/2  loss 2.5000  lr 0.001  4,096 tokens/s  MFU 41.2%  2.00 GiB")
