"""Every command in docs/configuration.md runs and prints what the page says, `...` standing for any text or lines."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from pages import commands, is_as_shown

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf8")


COMMANDS = commands(PAGE)


def json_blocks():
    return re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def at_root(tmp_path, monkeypatch):
    """A folder with the examples and the file that the page breaks on purpose."""
    shutil.copytree(ROOT / "examples" / "configs", tmp_path / "examples" / "configs")
    (tmp_path / "broken.json").write_text(json_blocks()[1])
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("line", "shown"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_the_command_prints_what_the_page_shows(mizzen, at_root, line, shown):
    program, *words = shlex.split(line)
    assert program == "mizzen"
    ran = mizzen(*words)
    assert ran.code == (2 if "problem" in shown else 0), ran.err
    assert is_as_shown(shown, ran.out), ran.out


def test_every_command_is_on_the_page():
    names = {
        " ".join(line.split()[1:3]) if line.split()[1] in ("config", "bench") else line.split()[1]
        for line, _ in COMMANDS
    }
    shown = names | {"config docs"} if "`mizzen config docs`" in PAGE else names
    assert shown == {
        *("config check", "config resolve", "config explain", "config schema", "config docs"),
        *("plan", "elastic", "report", "bench comm"),
    }


def test_the_example_on_the_page_is_the_file():
    assert json_blocks()[0] == (ROOT / "examples" / "configs" / "zero2_bf16.json").read_text()
