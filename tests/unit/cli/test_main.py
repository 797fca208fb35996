"""Finding the command, errors as one line, exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mizzen.cli.main import GROUPS
from mizzen.errors import CommError

ROOT = Path(__file__).parents[3]
NAMES = [command.name for _, commands in GROUPS for command in commands]


def start(*words, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen([sys.executable, "-m", "mizzen.cli", *words], env=environment, text=True, **options)


def test_without_a_command_the_help_is_printed(mizzen):
    ran = mizzen()
    assert ran.code == 0
    assert ran.out == mizzen("--debug").out
    for name in NAMES:
        assert f"  {name} " in ran.out
    assert "examples:\n  mizzen config check" in ran.out


def test_commands_that_do_not_exist_yet_are_not_listed(mizzen):
    words = mizzen().out.split()
    assert "tune" not in words


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help_with_examples(mizzen, capsys, name):
    with pytest.raises(SystemExit) as stopped:
        mizzen(name, "--help")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: mizzen {name}")
    assert "examples:\n  " in text


@pytest.mark.parametrize("name", ["config", "bench"])
def test_a_command_without_its_subcommand_prints_its_help(mizzen, name):
    ran = mizzen(name)
    assert ran.code == 0
    assert ran.out.startswith(f"usage: mizzen {name}")


def test_the_version(mizzen):
    ran = mizzen("--version")
    assert ran.code == 0
    assert ran.out.startswith("mizzen ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["confg"], "mizzen: error: unknown command 'confg'; did you mean 'config'?\n"),
        (["frobnicate"], f"mizzen: error: unknown command 'frobnicate'; known: {', '.join(NAMES)}\n"),
        (["--wrong"], "mizzen: error: unrecognized arguments: --wrong (see mizzen --help)\n"),
        (
            ["config", "check"],
            "mizzen: error: the following arguments are required: FILE (see mizzen config check --help)\n",
        ),
        (
            ["config", "check", "f", "--world", "0"],
            "mizzen: error: argument --world: '0' is not a whole number of at least 1 "
            "(see mizzen config check --help)\n",
        ),
        (
            ["config", "resolve", "absent.json", "--world", "8"],
            "mizzen: error: cannot read absent.json: No such file or directory\n",
        ),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(mizzen, words, message):
    ran = mizzen(*words)
    assert (ran.code, ran.out, ran.err) == (2, "", message)


def test_other_errors_of_ours_exit_with_1(mizzen, monkeypatch):
    def fail(_):
        raise CommError("rank 3 has left")

    monkeypatch.setattr("mizzen.cli.config.check", fail)
    ran = mizzen("config", "check", "file")
    assert (ran.code, ran.err) == (1, "mizzen: error: rank 3 has left\n")


def test_debug_shows_the_traceback(mizzen):
    with pytest.raises(Exception, match=r"absent\.json"):
        mizzen("config", "resolve", "absent.json", "--world", "8", "--debug")


def test_an_interrupt_is_silent(mizzen, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mizzen.cli.config.check", interrupt)
    ran = mizzen("config", "check", "file")
    assert (ran.code, ran.out, ran.err) == (130, "", "")


def test_a_reader_that_leaves_is_no_error():
    process = start("config", "docs", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()  # long before the first byte is written
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["config", "check", "examples/configs/zero2_bf16.json", "--world", "8"],
        ["config", "resolve", "examples/configs/3d.json", "--world", "512"],
        ["config", "explain", "zero_optimization.stage"],
        ["config", "schema"],
        ["elastic", "-c", "examples/configs/elastic.json"],
    ],
)
def test_commands_about_configurations_load_no_torch_and_no_rich(words):
    code = (
        "import sys; from mizzen.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ('torch' in sys.modules) * 10 or ('rich' in sys.modules) * 11)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code, *words]
    ran = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    assert ran.returncode == 0
