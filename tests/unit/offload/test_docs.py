"""Every command of docs/offload.md prints what the page shows; the keys of the page are read."""

import json
import re
import shlex
from pathlib import Path

import pytest

from mizzen.cli import main
from mizzen.config.load import load
from pages import commands, is_as_shown

PAGE = (Path(__file__).parents[3] / "docs" / "offload.md").read_text(encoding="utf8")
COMMANDS = [(line, shown) for line, shown in commands(PAGE) if line.startswith("mizzen bench io")]


@pytest.mark.parametrize(("line", "shown"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_the_command_prints_what_the_page_shows(tmp_path, monkeypatch, capsys, line, shown):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)[1:]) == 0
    said = capsys.readouterr().out
    assert is_as_shown(shown, said), said
    assert not any(path.is_dir() and any(path.iterdir()) for path in tmp_path.iterdir())


def test_there_are_such_commands():
    assert len(COMMANDS) == 2


def test_the_keys_of_the_page():
    (block,) = (text for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL) if '"aio"' in text)
    config = load(json.loads(block)).aio
    assert config.block_size == 1 << 20 and config.queue_depth == 8 and config.direct and config.verify


def test_the_plan_of_late_updates(tmp_path, monkeypatch, capsys):
    (block,) = (text for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL) if '"zenflow"' in text)
    (tmp_path / "zenflow.json").write_text(block)
    ((line, shown),) = [(line, shown) for line, shown in commands(PAGE) if "zenflow" in line]
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)[1:]) == 0
    said = capsys.readouterr().out
    assert is_as_shown(shown, said), said
