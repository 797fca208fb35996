"""The commands on docs/plan.md print what the page shows, and its code runs."""

import re
import shlex
from pathlib import Path

import pytest

from mizzen.cli.main import main

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "plan.md").read_text()
COMMANDS = re.findall(r"```console\n\$ mizzen (.*?)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("line", "shown"), COMMANDS, ids=[line for line, _ in COMMANDS])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_commands_print_what_the_page_shows(line, shown, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(line)) == (2 if "refused" in shown else 0)
    assert capsys.readouterr().out == shown


def test_the_code_prices_plans_of_several_worlds():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(compile(block, "docs/plan.md", "exec"), names)
    totals = names["totals"]
    assert totals[1] > totals[8] > totals[64] > 4 * 2 * 50_000 * 1024
