"""How ranks end, what is said of it, and what follows."""

import json
import subprocess
import sys

import pytest

from mizzen.launcher.outcome import (
    Failure,
    NextAction,
    Outcome,
    decide,
    end_of,
    last_words,
    record_outcome,
    root_cause,
    traceback_in,
)
from mizzen.progress import announce_run, announced_run


def test_words_of_a_failure():
    assert str(Failure(3, "w1", 7)) == "rank 3 on w1 ended with exit code 7"
    told = Failure(3, "w1", 7, role="stage 1 of 2, tensor rank 1")
    assert str(told) == "rank 3 (stage 1 of 2, tensor rank 1) on w1 ended with exit code 7"
    killed = Failure(3, "w1", -9, resident=3 * 2**30)
    assert "signal 9 (SIGKILL)" in str(killed) and "out of memory; it was last seen with 3.00 GiB" in str(killed)
    assert killed.code == 137 and Failure(0, "w", 5).code == 5
    assert "a crash in compiled code" in str(Failure(0, "w", -11))


def test_the_cause_is_not_the_rank_that_only_tells_of_it():
    told = Failure(0, "w", 1, "Traceback\nmizzen.errors.CommError: rank 2 was killed")
    assert told.is_secondary
    assert root_cause([told, Failure(2, "w", 1, "ValueError: bad")]).rank == 2
    assert root_cause([Failure(1, "w", 1, "ValueError: bad"), Failure(2, "w", -9)]).rank == 2
    assert root_cause([told, Failure(1, "w", 1, told.trace)]).rank == 0


@pytest.mark.parametrize(
    ("ending", "asked", "elastic", "code"),
    [
        (Outcome("done"), False, False, 0),
        (Outcome("saved"), True, False, 75),
        (Outcome("saved"), False, False, 75),
        (Outcome("saved"), False, True, None),
        (Outcome("saved"), True, True, 75),
        (Outcome("unsaved"), True, False, 76),
        (Outcome("unsaved"), False, True, None),
        (Outcome("stopped", signal=15), True, False, 143),
        (Outcome("changed"), False, True, None),
        (Outcome("changed", reason="node 1 is lost"), False, True, None),
        (Outcome("lost", reason="gone"), False, False, 1),
        (Outcome("lost", reason="gone"), True, True, 76),
        (Outcome("failed", Failure(1, "w", -9, number=1)), False, False, None),
        (Outcome("failed", Failure(1, "w", -9, number=2)), False, False, 137),
        (Outcome("failed", Failure(1, "w", 3, number=1)), True, False, 3),
    ],
)
def test_what_follows(ending, asked, elastic, code):
    assert decide(ending, max_restarts=1, was_asked=asked, is_elastic=elastic).code == code


def test_only_the_node_of_the_failed_rank_speaks():
    failure = Failure(1, "w", 3, "trace", number=9)
    assert decide(Outcome("failed", failure), max_restarts=1, was_asked=False, is_elastic=False).trace == "trace"
    silent = decide(Outcome("failed", failure, is_ours=False), max_restarts=1, was_asked=False, is_elastic=False)
    assert (silent.code, silent.words) == (3, "")


CHAIN = """noise
Traceback (most recent call last):
  old handled
KeyError: 1
more noise
[rank1]: Traceback (most recent call last):
[rank1]:   File "a"
[rank1]: ZeroDivisionError: x

[rank1]: The above exception was the direct cause of the following exception:

[rank1]: Traceback (most recent call last):
[rank1]:   File "b"
[rank1]: ValueError: bad
"""


def test_the_traceback_is_the_last_with_what_led_to_it():
    found = traceback_in(CHAIN)
    assert found.startswith('Traceback (most recent call last):\n  File "a"') and found.endswith("ValueError: bad")
    assert traceback_in("nothing") == ""
    assert traceback_in("Traceback (most recent call last):\n  x\nE: y\nnoise after\n").endswith("E: y")


def ended(script, tmp_path):
    """Exit code and errors of a script of its own."""
    (tmp_path / "script.py").write_text(script)
    ran = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stderr


HANDLED = """
import atexit, sys, threading, traceback
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc()
"""


@pytest.mark.parametrize(
    ("script", "last"),
    [
        (
            HANDLED + "def f():\n    raise KeyError('late')\natexit.register(f)\nraise ValueError('bad')",
            "bad",
        ),
        (HANDLED + "class A:\n    def __del__(self):\n        {}[1]\na = A()\nint('x')", "'x'"),
        (HANDLED + "t = threading.Thread(target=lambda: [][1])\nt.start()\nt.join()\nint('x')", "'x'"),
        (
            "def f():\n    int('x')\ntry:\n    f()\nexcept ValueError as e:\n    raise KeyError('outer') from e",
            "outer'",
        ),
        ("raise ValueError('a\\n  b')", "  b"),
    ],
)
def test_the_traceback_is_that_of_the_error_that_ended_the_script(tmp_path, script, last):
    code, text = ended(script, tmp_path)
    found = last_words(text, code, is_python=True, is_shown=True)
    assert code == 1 and found.endswith(last), text
    assert found.startswith("Traceback") and found.count("Traceback") == 1 + ("from e" in script)


def test_a_script_that_chose_its_exit_code_had_no_error_that_nobody_caught(tmp_path):
    code, text = ended(HANDLED + "sys.stderr.write('no more data\\n')\nsys.exit(3)", tmp_path)
    assert code == 3 and "ZeroDivisionError" in text
    assert last_words(text, code, is_python=True, is_shown=True) == ""
    assert last_words(text, code, is_python=True, is_shown=False).endswith("no more data")
    assert last_words(text, code, is_python=False, is_shown=True).endswith("ZeroDivisionError: division by zero")
    assert last_words(text, -9, is_python=True, is_shown=True) == ""


WORKER = """Traceback (most recent call last):
  File "t.py", line 9, in <module>
    next(loader)
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 3, in loop
ValueError: sample 7
"""
MARKED = """[rank1]: Traceback (most recent call last):
[rank1]:   File "a"
[rank1]: RuntimeError: one
[rank1]: two
"""


def test_an_error_of_a_worker_comes_with_its_own_traceback():
    assert traceback_in(WORKER) == WORKER.rstrip()


def test_the_mark_of_torch_decides():
    assert traceback_in(WORKER + MARKED + WORKER) == MARKED.replace("[rank1]: ", "").rstrip()


def test_the_end_of_a_text_without_a_traceback():
    assert end_of("".join(f"{n}\r\n" for n in range(30))).splitlines() == [str(n) for n in range(10, 30)]
    assert end_of("bar 1\rbar 2\rbar 3\n\nno such file\n\n") == "bar 3\n\nno such file"
    assert end_of("") == ""


def test_how_an_attempt_ended_is_noted_beside_its_ranks(tmp_path, monkeypatch):
    attempt = tmp_path / "attempt-0"
    attempt.mkdir()
    record_outcome(attempt, "node1", NextAction(1, "before any rank has said where"))
    monkeypatch.setenv("MIZZEN_PROGRESS", str(attempt))
    announce_run(tmp_path / "run.ranks")
    assert announced_run(attempt) == tmp_path / "run.ranks"
    record_outcome(attempt, "node1", NextAction(0))  # one that needs no words
    record_outcome(attempt, "node1", NextAction(None, "rank 2 fell; restart 1 of 1"))
    record_outcome(attempt, "node1", NextAction(137, "rank 2 fell"))
    noted = (tmp_path / "run.ranks" / "launcher-node1.jsonl").read_text().splitlines()
    assert [(line["kind"], line["code"], line["text"]) for line in map(json.loads, noted)] == [
        ("ending", None, "rank 2 fell; restart 1 of 1"),
        ("ending", 137, "rank 2 fell"),
    ]


def test_a_note_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch):
    (tmp_path / "run.ranks").write_text("a file")
    monkeypatch.setenv("MIZZEN_PROGRESS", str(tmp_path))
    announce_run(tmp_path / "run.ranks")
    record_outcome(tmp_path, "node1", NextAction(1, "words"))
