"""The code and commands of docs/communication.md run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "communication.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.S)
COMMANDS = re.findall(r"^\$ mizzen (.*)$", PAGE, re.M)


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("code", "said"), list(zip(CODE, ["0 1 0\n", "True\n"], strict=True)))
def test_code(code, said):
    assert run("-c", code) == said


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command):
    assert "all_reduce" in run("-m", "mizzen.cli", *command.split())
