"""Running the command inside this process."""

from dataclasses import dataclass

import pytest

from mizzen.cli import main


@dataclass
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def mizzen(capsys):
    """Call it with the words of a command line."""

    def run(*words):
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run
