"""How ranks end, what is said of it, and what follows."""

import os
import subprocess
import sys
import time

import pytest

from mizzen.launcher.ending import Ending, decide
from mizzen.launcher.failure import Failure, first_of
from mizzen.launcher.hang import Sighting, culprits, is_hung, sentence
from mizzen.launcher.output import LONGEST, Outlet
from mizzen.launcher.place import Member, inherited, settle
from mizzen.launcher.trace import end_of, last_words, traceback_in


def test_words_of_a_failure():
    assert str(Failure(3, "w1", 7)) == "rank 3 on w1 ended with exit code 7"
    killed = Failure(3, "w1", -9, resident=3 * 2**30)
    assert "signal 9 (SIGKILL)" in str(killed) and "out of memory; it was last seen with 3.00 GiB" in str(killed)
    assert killed.code == 137 and Failure(0, "w", 5).code == 5
    assert "a crash in compiled code" in str(Failure(0, "w", -11))


def test_the_cause_is_not_the_rank_that_only_tells_of_it():
    told = Failure(0, "w", 1, "Traceback\nmizzen.errors.CommError: rank 2 was killed")
    assert told.is_secondary
    assert first_of([told, Failure(2, "w", 1, "ValueError: bad")]).rank == 2
    assert first_of([Failure(1, "w", 1, "ValueError: bad"), Failure(2, "w", -9)]).rank == 2
    assert first_of([told, Failure(1, "w", 1, told.trace)]).rank == 0


@pytest.mark.parametrize(
    ("ending", "asked", "elastic", "code"),
    [
        (Ending("done"), False, False, 0),
        (Ending("saved"), True, False, 75),
        (Ending("saved"), False, False, 75),
        (Ending("saved"), False, True, None),
        (Ending("saved"), True, True, 75),
        (Ending("unsaved"), True, False, 76),
        (Ending("unsaved"), False, True, None),
        (Ending("stopped", signal=15), True, False, 143),
        (Ending("changed"), False, True, None),
        (Ending("changed", reason="node 1 is lost"), False, True, None),
        (Ending("lost", reason="gone"), False, False, 1),
        (Ending("lost", reason="gone"), True, True, 76),
        (Ending("failed", Failure(1, "w", -9, number=1)), False, False, None),
        (Ending("failed", Failure(1, "w", -9, number=2)), False, False, 137),
        (Ending("failed", Failure(1, "w", 3, number=1)), True, False, 3),
    ],
)
def test_what_follows(ending, asked, elastic, code):
    assert decide(ending, max_restarts=1, was_asked=asked, is_elastic=elastic).code == code


def test_only_the_node_of_the_failed_rank_speaks():
    failure = Failure(1, "w", 3, "trace", number=9)
    assert decide(Ending("failed", failure), max_restarts=1, was_asked=False, is_elastic=False).trace == "trace"
    silent = decide(Ending("failed", failure, is_ours=False), max_restarts=1, was_asked=False, is_elastic=False)
    assert (silent.code, silent.words) == (3, "")


def seen(rank, *, waited=0.0, step=5, number=7):
    return Sighting(rank, "w", step, "forward", "all_reduce", number, waited > 0, waited)


def test_what_a_hang_is():
    assert is_hung([seen(0, waited=6), seen(1)], 5)
    assert not is_hung([seen(0, waited=4), seen(1)], 5)
    assert not is_hung([seen(0, waited=600, step=0), seen(1, step=0)], 5), "a first step may take long"
    assert not is_hung([seen(0), seen(1)], 5), "nobody waits: an evaluation"
    assert not is_hung([seen(0, waited=600)], 0)


def test_who_is_waited_for():
    assert [one.rank for one in culprits([seen(0, waited=6), seen(1), seen(2, waited=6)])] == [1]
    assert [one.rank for one in culprits([seen(0, waited=6), seen(1, waited=6, number=6)])] == [1]
    assert culprits([seen(0, waited=6), seen(1, waited=6)]) == []
    said = sentence([seen(0, waited=6), seen(1)])
    assert said.startswith("hung: rank 0 has waited 6.0 s in all_reduce after step 5; rank 1 on w is not there: step 5")


def test_ranks_follow_the_order_of_the_nodes():
    members = [Member(2, 1, "c", ""), Member(0, 4, "a", ""), Member(1, 2, "b", "")]
    assert [settle(members, index) for index in (0, 1, 2)] == [(0, 0, 7), (1, 4, 7), (2, 6, 7)]


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


def test_lines_are_whole(capfd, tmp_path):
    file = (tmp_path / "log").open("wb")
    first, second = Outlet(prefix=b"[0] ", is_shown=True, file=file), Outlet(prefix=b"[1] ", is_shown=True)
    first.feed(b"half", "out")
    second.feed(b"whole\nrest", "out")
    first.feed(b" and half\n", "out")
    first.feed(b"bar 1\rbar 2\r", "err")
    second.feed(b"", "out")
    first.feed(b"", "err")
    out, err = capfd.readouterr()
    assert out == "[1] whole\n[0] half and half\n[1] rest\n"
    assert err == "[0] bar 1\rbar 2\r\n" and bytes(first.kept) == b"bar 1\rbar 2\r"
    file.close()
    assert (tmp_path / "log").read_bytes() == b"half and half\nbar 1\rbar 2\r\n"


def test_a_line_that_never_ends_is_cut(tmp_path):
    """As of a progress bar that draws for days."""
    with (tmp_path / "log").open("wb", buffering=0) as file:
        outlet = Outlet(file=file)
        for _ in range(5):
            outlet.feed(b"50%\r" * (LONGEST // 16), "err")
        assert sum(map(len, outlet.open_line.values())) < LONGEST
    assert (tmp_path / "log").read_bytes() == b"50%\r" * (LONGEST // 4) + b"\n"


def test_a_file_that_takes_no_more_is_given_up(capfd):
    outlet = Outlet(prefix=b"[0] ", is_shown=True, file=open("/dev/full", "ab", buffering=0))  # noqa: SIM115
    for word in (b"one\n", b"two\n"):
        outlet.feed(word, "out")
    out, err = capfd.readouterr()
    assert out == "[0] one\n[0] two\n"
    assert err == "mizzen: warning: /dev/full: what the rank prints is no longer kept (No space left on device)\n"


WRITES = "from mizzen.launcher.output import write; write('out', b'x' * 200_000); write('err', b'done')"


@pytest.mark.parametrize("place", ["full", "pipe"])
def test_what_cannot_be_written_now_ends_nothing(place):
    """A full disk takes nothing; a pipe that another program has set to wait for nobody takes it bit by bit."""
    read, out = os.pipe()
    os.set_blocking(out, False)
    out = os.open("/dev/full", os.O_WRONLY) if place == "full" else out
    with subprocess.Popen([sys.executable, "-c", WRITES], stdout=out, stderr=subprocess.PIPE) as child:
        os.close(out)
        time.sleep(0.5)
        got = 0
        while place == "pipe" and (data := os.read(read, 4096)):
            got += len(data)
        assert child.stderr.read() == b"done"
    assert got == (200_000 if place == "pipe" else 0)


def test_the_stacks_of_torch_are_not_written_unless_somebody_asks():
    assert inherited({"HOME": "/h", "RANK": "3"})["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    assert inherited({"TORCH_CPP_LOG_LEVEL": "INFO"})["TORCH_CPP_LOG_LEVEL"] == "INFO"
