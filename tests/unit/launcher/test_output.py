"""Where the output of processes goes, and that none of it is lost."""

import os
import subprocess
import sys
import threading
import time

import pytest

from mizzen.launcher.output import LONGEST, PIPE_CAPACITY, PipeReader, ProcessOutput
from mizzen.launcher.workers import Worker, WorkerGroup, WorkerSpec


def test_lines_are_whole(capfd, tmp_path):
    file = (tmp_path / "log").open("wb")
    first, second = (
        ProcessOutput(prefix=b"[0] ", is_shown=True, file=file),
        ProcessOutput(prefix=b"[1] ", is_shown=True),
    )
    first.feed(b"half", "out")
    second.feed(b"whole\nrest", "out")
    first.feed(b" and half\n", "out")
    first.feed(b"bar 1\rbar 2\r", "err")
    second.feed(b"", "out")
    first.feed(b"", "err")
    out, err = capfd.readouterr()
    assert out == "[1] whole\n[0] half and half\n[1] rest\n"
    assert err == "[0] bar 1\rbar 2\r\n" and bytes(first.error_tail) == b"bar 1\rbar 2\r"
    file.close()
    assert (tmp_path / "log").read_bytes() == b"half and half\nbar 1\rbar 2\r\n"


def test_a_line_that_never_ends_is_cut(tmp_path):
    """As of a progress bar that draws for days."""
    with (tmp_path / "log").open("wb", buffering=0) as file:
        output = ProcessOutput(file=file)
        for _ in range(5):
            output.feed(b"50%\r" * (LONGEST // 16), "err")
        assert sum(map(len, output.partial_lines.values())) < LONGEST
    assert (tmp_path / "log").read_bytes() == b"50%\r" * (LONGEST // 4) + b"\n"


def test_a_file_that_takes_no_more_is_given_up(capfd):
    output = ProcessOutput(prefix=b"[0] ", is_shown=True, file=open("/dev/full", "ab", buffering=0))  # noqa: SIM115
    for word in (b"one\n", b"two\n"):
        output.feed(word, "out")
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


def read_from(script, output, reader=None):
    """A process of its own whose output is read."""
    words = [sys.executable, "-S", "-c", script]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    reader = reader or PipeReader()
    reader.add(process, output)
    reader.start()
    return process, reader


class Slow(ProcessOutput):
    """Takes nothing before it is told to, as a reader on a machine with too much to do."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def feed(self, data, pipe):
        self.go.wait()
        super().feed(data, pipe)


def test_the_traceback_of_a_rank_is_waited_for_however_slow_the_reader_is(tmp_path):
    output = Slow()
    group = WorkerGroup("w", tmp_path, cleanup=None)
    process, _ = read_from("raise ValueError('bad luck')", output, group.pipes)
    group.workers.append(Worker(WorkerSpec(3, 0, (), {}, output), process))
    process.wait()
    threading.Timer(0.5, output.go.set).start()
    (failure,) = group.failures(is_asked=False)
    assert failure.rank == 3 and failure.trace.endswith("ValueError: bad luck")


LEAVES_A_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
sys.stderr.write(f"{child.pid}")
"""
NEVER_ENDS = f"import os\nwhile True: os.write(2, b'x' * {PIPE_CAPACITY})"


def test_a_child_that_has_the_pipe_open_is_not_waited_for():
    output = ProcessOutput()
    process, reader = read_from(LEAVES_A_CHILD, output)
    process.wait()
    reader.drain(limit=float("inf"))
    assert reader._thread.is_alive()
    os.kill(int(output.error_tail), 9)
    reader._thread.join()


def test_a_process_that_goes_on_writing_is_not_waited_for():
    output = ProcessOutput()
    process, reader = read_from(NEVER_ENDS, output)
    reader.drain(limit=float("inf"))
    assert process.poll() is None
    process.kill()
    process.wait()
    reader.drain(limit=float("inf"))
    reader._thread.join()
