"""docs/profile.md: its command is run, its picture is what that draws, and its code and configurations work."""

import io
import json
import re
import runpy
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path

from mizzen.config.load import load
from pages import commands, is_as_shown

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "profile.md").read_text()


def run(line):
    _, script, *arguments = shlex.split(line)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(ROOT / "examples"))
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return printed.getvalue()


def test_the_command_prints_and_draws_what_the_page_shows(world, tmp_path, monkeypatch):
    [(line, shown)] = commands(PAGE)
    monkeypatch.chdir(tmp_path)
    [printed] = world(1, init=False).run(run, line, timeout=120)
    assert is_as_shown(shown, printed), printed
    assert (tmp_path / "operations.svg").read_text() == (ROOT / "docs" / "operations.svg").read_text()


def test_the_code_and_the_configurations_of_the_page_work():
    names = {}
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/profile.md", "exec"), names)
    assert names["flops"] == "524.29 K" and names["heaviest"].path == "2"
    for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL):
        load(json.loads(text))
