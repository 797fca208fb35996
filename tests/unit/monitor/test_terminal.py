import io
import re
import subprocess
import sys

import pytest

from mizzen.config.resolve import resolve
from mizzen.environment import World
from mizzen.monitor.terminal import (
    Printer,
    PrintOptions,
    ProgressLine,
    Screen,
    SkippedSteps,
    StepWindow,
    dump_state,
    is_milestone,
)

ERASE = "\x1b[2K"


def test_a_line_stays(capsys):
    Screen().say("hello")
    assert capsys.readouterr() == ("", "mizzen: hello\n")


def test_the_passing_line_is_drawn_over_and_gives_way_to_lines_that_stay(terminal):
    seen = terminal()
    screen = Screen()
    assert screen.can_redraw
    screen.show("one")
    screen.show("two")
    assert seen() == f"one\r{ERASE}two\r"
    screen.say("stays")
    assert seen() == f"{ERASE}mizzen: stays\r\n"
    screen.erase()
    screen.keep()
    assert seen() == "", "nothing is drawn any more"
    screen.show("last")
    screen.keep()
    assert seen() == "last\r\r\n"


def test_the_passing_line_never_wraps(terminal):
    seen = terminal()
    Screen().show("x" * 300)
    assert seen() == "x" * 99 + "…\r"


def test_it_leaves_cursor_and_streams_alone(terminal):
    seen = terminal()
    before = sys.stdout, sys.stderr
    screen = Screen()
    screen.show("line")
    assert (sys.stdout, sys.stderr) == before
    assert "\x1b[?25l" not in seen(), "a hidden cursor would stay hidden after a kill"


@pytest.mark.parametrize("kind", ["file", "dumb terminal"])
def test_where_a_line_cannot_be_written_over(kind, request, monkeypatch):
    if kind == "dumb terminal":
        request.getfixturevalue("terminal")()
        monkeypatch.setenv("TERM", "dumb")
    else:
        monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not Screen().can_redraw


def test_a_terminal_that_has_gone_away_is_given_up(monkeypatch, warned):
    class Gone(io.StringIO):
        writes = 0

        def write(self, text):
            Gone.writes += 1
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Gone())
    screen = Screen()
    screen.say("one")
    screen.say("two")
    screen.show("three")
    assert Gone.writes == 1
    assert [text.split(":")[0] for text in warned] == ["standard error"]


def test_rates_and_means(step):
    window = StepWindow()
    assert window.rates() == {} and window.step_seconds() is None and window.phases() == {}
    window.add(step(1, seconds=1.0, tokens=100, phases={"forward": 0.1, "step": 0.2}))
    window.add(step(2, seconds=3.0, tokens=300, phases={"forward": 0.3, "step": 0.2}))
    assert window.rates() == {"samples": 4.0, "tokens": 100.0}
    assert window.step_seconds() == 2.0
    assert window.phases() == pytest.approx({"forward": 200.0, "step": 200.0})


def test_the_first_step_of_a_run_is_not_timed(step):
    window = StepWindow(is_first=True)
    window.add(step(1, seconds=60.0, phases={"forward": 0.1}))
    assert window.rates() == {} and window.step_seconds() is None
    assert window.phases() == {"forward": 100.0}
    window.add(step(2, seconds=2.0))
    assert window.rates() == {"samples": 4.0} and window.step_seconds() == 2.0


def test_tokens_are_said_only_if_every_step_showed_them(step):
    window = StepWindow()
    window.add(step(1, tokens=100))
    window.add(step(2, tokens=None))
    assert window.rates() == {"samples": 16.0}


def test_the_share_of_the_device_is_that_of_the_steps_that_know_it(step):
    window = StepWindow()
    assert window.mfu() is None
    window.add(step(1, seconds=9.0))
    assert window.mfu() is None
    window.add(step(2, seconds=1.0, measures={"mfu": 0.5}))
    window.add(step(3, seconds=3.0, measures={"mfu": 0.3}))
    assert window.mfu() == pytest.approx(0.35)


def test_a_step_whose_times_were_not_there_yet_is_not_in_the_mean(step):
    window = StepWindow()
    window.add(step(1, phases={}))
    window.add(step(2, phases={"forward": 0.1}))
    assert window.phases() == {"forward": 100.0}


def test_a_skipped_step_is_said_with_its_reason(step, warned):
    skips = SkippedSteps(Screen())
    skips.on_step(step(4))
    skips.on_step(step(4, reason="step 5: gradient not finite on rank 1: head.weight", skipped_steps=3))
    skips.on_step(step(4, reason="accumulating"))
    skips.close()
    assert warned == ["skipped step 5: gradient not finite on rank 1: head.weight; 3 skipped so far"]


def test_the_loss_scale_is_said_where_there_is_one(step, warned):
    SkippedSteps(Screen()).on_step(step(0, reason="step 1: overflow", skipped_steps=1, loss_scale=65536.0))
    assert warned == ["skipped step 1: overflow; 1 skipped so far, loss scale 65536"]


def test_the_first_ten_one_by_one_then_every_hundredth(step, warned):
    skips = SkippedSteps(Screen())
    for count in range(1, 351):
        skips.on_step(step(0, reason="step 1: overflow", skipped_steps=count))
    counts = [int(text.split("; ")[1].split()[0]) for text in warned]
    assert counts == [*range(1, 11), 100, 200, 300]
    assert [text for text in warned if "from here on only every 100th is said" in text] == [warned[9]]


def test_the_passing_line_gives_way(step, warned, terminal):
    seen = terminal()
    screen = Screen()
    screen.show("line")
    SkippedSteps(screen).on_step(step(0, reason="step 1: overflow"))
    assert seen().startswith("line\r\x1b[2K") and len(warned) == 1


@pytest.fixture
def said(capsys):
    return lambda: capsys.readouterr().err.splitlines()


@pytest.fixture
def printer(memory):
    return lambda **lines: Printer(Screen(), memory, PrintOptions(**lines))


def test_milestones_get_rarer():
    assert [count for count in range(1, 2001) if is_milestone(count)] == [1, 10, 20, 50, 100, 200, 500, 1000, 2000]
    assert sum(map(is_milestone, range(1, 1_000_001))) == 17


def test_a_line_at_each_milestone_with_the_loss_read_only_there(printer, said, step):
    reads = []
    lines = printer()
    for number in range(1, 101):
        lines.on_step(step(number, loss=lambda number=number: reads.append(number) or 1 / number))
    assert reads == [1, 10, 20, 50, 100]
    assert [line.split(",")[0] for line in said()] == [f"mizzen: step={number}" for number in reads]


def test_a_resumed_run_starts_its_milestones_again(printer, said, step):
    lines = printer()
    for number in range(5_001, 5_021):
        lines.on_step(step(number))
    assert [line.split(",")[0] for line in said()] == [f"mizzen: step={number}" for number in (5001, 5010, 5020)]


def test_an_interval_is_kept_exactly(printer, said, step):
    lines = printer(every=3)
    for number in range(1, 11):
        lines.on_step(step(number))
    assert [line.split(",")[0] for line in said()] == ["mizzen: step=3", "mizzen: step=6", "mizzen: step=9"]


def test_the_line_has_the_known_names_and_our_numbers(printer, said, step):
    lines = printer(every=2, loss_scale=True)
    fields = {"lr": (1e-3, 5e-4), "momentum": ((0.9, 0.95), None), "loss_scale": 65536.0, "skipped_steps": 1}
    lines.on_step(step(1, seconds=60.0, tokens=1024, **fields))
    lines.on_step(step(2, seconds=0.5, tokens=1024, **fields))
    assert said() == [
        "mizzen: step=2, skipped=1, lr=[0.001, 0.0005], mom=[(0.9, 0.95), None], loss=2.5, grad_norm=1.5, "
        "loss_scale=65536, samples_per_sec=16.00, tokens_per_sec=2048.00, memory=2.00 GiB"
    ]


def test_what_is_not_known_or_not_wanted_is_left_out(printer, said, step):
    lines = printer(every=1, rate=False)
    for number in (1, 2):
        lines.on_step(step(number, loss=None, norm=None))
    assert said()[-1] == "mizzen: step=2, skipped=0, lr=[0.001], memory=2.00 GiB"


def test_a_skipped_step_repeats_no_line(printer, said, step):
    lines = printer(every=10)
    lines.on_step(step(10))
    lines.on_step(step(10, reason="step 11: not finite"))
    lines.close()
    assert len(said()) == 1


def test_rates_are_those_since_the_last_line(printer, said, step):
    lines = printer(every=2)
    for number in range(1, 5):
        lines.on_step(step(number, seconds=8.0 if number < 3 else 2.0))
    assert ["samples_per_sec=1.00" in line for line in said()] == [True, False]
    lines.on_step(step(5, seconds=1.0))
    lines.on_step(step(6, seconds=1.0))
    assert "samples_per_sec=8.00" in said()[0]


def test_breakdowns_of_time_and_memory(printer, said, step):
    lines = printer(every=2, progress=False, phases=True, memory=True)
    for number in (1, 2):
        phases = {"forward": 0.001 * number, "backward": 0.004, "step": 0.0005}
        lines.on_step(step(number, phases=phases, loss=lambda: pytest.fail("read")))
    assert said() == [
        "mizzen: time (ms) | forward: 1.50 | backward: 4.00 | step: 0.50",
        "mizzen: memory | allocated: 2.00 GiB | reserved: 3.00 GiB | peak: unknown",
    ]


def test_without_timed_phases_there_is_no_line_of_them(printer, said, step):
    printer(every=1, progress=False, phases=True).on_step(step(1))
    assert said() == []


def test_the_configuration_is_dumped_on_rank_0_when_asked_without_keys_to_services(config, said):
    settings = resolve(config(dump_state=True, comet={"enabled": True, "api_key": "secret"}), 4).config
    dump_state(settings, World(rank=1, size=4))
    assert said() == []
    dump_state(settings, World(rank=0, size=4))
    lines = said()
    assert lines[0] == "mizzen: configuration, without defaults"
    found = {line.split()[0]: line.split()[1:3] for line in lines[1:]}
    assert found["train_batch_size"] == ["8", "given"]
    assert found["train_micro_batch_size_per_gpu"] == ["2", "derived"]
    assert "comet.enabled" in found and "secret" not in "".join(lines)
    dump_state(config(), World())
    assert said() == []


def test_the_share_of_the_device_is_printed_where_it_is_known(printer, said, step):
    lines = printer(every=1)
    lines.on_step(step(1, measures={"mfu": 0.9}))  # not timed
    lines.on_step(step(2, measures={"mfu": 0.4123}))
    first, second = said()
    assert "mfu" not in first and "samples_per_sec=16.00, mfu=41.2%, memory" in second


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
from mizzen.monitor.terminal import ProgressLine
from mizzen.monitor.report import StepReport
from mizzen.monitor.terminal import Screen
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
