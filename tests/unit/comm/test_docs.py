"""The code and commands of docs/communication.md run."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "communication.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.S)
COMMANDS = re.findall(r"^\$ mizzen (.*)$", PAGE, re.M)


@pytest.mark.parametrize(("code", "said"), list(zip(CODE, ["0 1 0\n", "True\n"], strict=True)))
def test_code(python, code, said):
    done = python("-c", code)
    assert (done.stdout, done.returncode) == (said, 0), done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(python, command):
    done = python("-m", "mizzen.cli", *command.split())
    assert done.returncode == 0 and "all_reduce" in done.stdout, done.stderr
