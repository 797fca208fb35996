"""Every command in docs/launcher.md runs and prints what the page says, `...` standing for any text or lines."""

import re
import shlex
from pathlib import Path

import pytest

from launches import ROOT, environment
from mizzen.launcher.signals import SAVED, UNSAVED
from mizzen.launcher.supervisor import HUNG
from pages import block, commands, is_as_shown

PAGE = (ROOT / "docs" / "launcher.md").read_text(encoding="utf8")


COMMANDS = commands(PAGE)


@pytest.mark.parametrize(("line", "shown"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_the_command_prints_what_the_page_shows(python, tmp_path, line, shown):
    (tmp_path / "hello.py").write_text(block(PAGE, "python"))
    (tmp_path / "hosts").write_text(block(PAGE, "text"))
    program, *words = shlex.split(line)
    assert program == "mizzen"
    ran = python("-m", "mizzen.cli", *words, cwd=tmp_path, env=environment())
    assert ran.returncode == 0, ran.stderr
    assert is_as_shown(shown, ran.stdout), ran.stdout


def test_the_codes_on_the_page_are_those_of_the_code():
    codes = re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)
    assert {int(code) for code in codes} == {0, 1, 2, SAVED, UNSAVED, HUNG}


def test_files_that_the_page_names_exist():
    assert Path(ROOT / "tests/cluster/install.sh").is_file()
    for target in ("test-cluster", "faults-launcher"):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text() and f"make {target}" in PAGE
