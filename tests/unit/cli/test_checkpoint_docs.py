"""Every command of docs/checkpoints.md prints what the page shows; the keys of the page are read."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from mizzen.config.load import load
from pages import commands, is_as_shown
from unit.checkpoint.test_files import save

PAGE = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf8")
COMMANDS = commands(PAGE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        save(Path("checkpoints"), {"weight": torch.randn(3, 2)}, tag=f"step{step}", step=step)


@pytest.mark.parametrize(("line", "shown"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_the_command_prints_what_the_page_shows(mizzen, folder, line, shown):
    program, *words = shlex.split(line)
    ran = mizzen(*words)
    assert program == "mizzen" and ran.code == 0, ran.err
    assert is_as_shown(shown, ran.out), ran.out


def test_every_command_is_on_the_page():
    names = {line.split()[2] for line, _ in COMMANDS}
    assert names == {"ls", "show", "verify", "diff", "export", "import", "prune"}


def test_the_keys_of_the_page():
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    config = load(json.loads(block)).checkpoint
    assert config.keep_last == 3 and config.on_corrupt == "previous" and config.async_save
