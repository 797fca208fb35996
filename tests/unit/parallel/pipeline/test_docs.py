"""docs/pipeline.md says what is: its numbers, its picture, its commands and messages."""

import re
import shlex
from pathlib import Path

import pytest

from mizzen.cli.main import main
from mizzen.errors import PlanError
from mizzen.parallel.pipeline.drawing import draw
from mizzen.parallel.pipeline.partition import partition
from mizzen.parallel.pipeline.schedule import Schedule, peak_activations
from mizzen.parallel.pipeline.tables import TABLES, make_schedule, split_last
from mizzen.parallel.pipeline.timeline import Times, timeline
from pages import commands, is_as_shown

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "pipeline.md").read_text(encoding="utf8")


@pytest.mark.parametrize("name", TABLES)
def test_the_numbers_of_a_schedule(name):
    made, few = make_schedule(name, 4, 8), make_schedule(name, 4, 3)
    bubbles = [f"{100 * timeline(each, Times()).bubble:.1f} %" for each in (made, few)]
    kept = ", ".join(map(str, peak_activations(made)))
    assert f"| `{name}` | {made.chunks_per_stage} | {bubbles[0]} | {bubbles[1]} | {kept} |" in PAGE


def test_what_halves_leave_of_the_bubble():
    whole = make_schedule("1f1b", 4, 8)
    left, before = (f"{100 * timeline(each, Times()).bubble:.1f} %" for each in (split_last(whole), whole))
    assert f"leaves {left} of the {before}." in PAGE


def test_the_picture_is_the_one_that_is_drawn():
    drawn = draw(timeline(split_last(make_schedule("1f1b", 4, 8)), Times()), assumed=True)
    assert (DOCS / "pipeline-1f1b.svg").read_text(encoding="utf8") == drawn


def test_the_command_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (written,) = (
        each for each in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL) if "schedule" in each and "1f1b" in each
    )
    (tmp_path / "pipeline.json").write_text(written)
    ((line, shown),) = commands(PAGE)
    main(shlex.split(line)[1:])
    assert is_as_shown(shown, capsys.readouterr().out)


def test_the_programs_run():
    for program in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(program, "pipeline.md", "exec"), {})


@pytest.mark.parametrize(
    "call",
    [
        lambda: make_schedule("1f1f", 4, 8),
        lambda: make_schedule("1f1b", 4, 8, 2),
        lambda: make_schedule("zbv", 4, 8, 1),
        lambda: Schedule.of(["0F0 0B0", "1B0 1F0"]),
        lambda: Schedule.of(["0F0 0I0"]),
        lambda: Schedule.of(["0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"]),
        lambda: partition([1, 1], "uniform", 3),
        lambda: partition(["Block", "Head"], "type:layer", 2),
    ],
)
def test_messages_are_on_the_page(call):
    with pytest.raises(PlanError) as refused:
        call()
    assert str(refused.value) in PAGE


def test_what_slow_messages_cost():
    bubbles = {name: timeline(make_schedule(name, 4, 8), Times(transfer=0.1)).bubble for name in ("gpipe", "1f1b")}
    assert f"`gpipe` is {100 * bubbles['gpipe']:.1f} %, that of `1f1b` {100 * bubbles['1f1b']:.1f} %" in PAGE
