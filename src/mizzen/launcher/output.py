"""What ranks print: some of it to the terminal, all of it to files when asked, and the end of it kept for the report.

One thread reads all pipes. A line is written in one piece, so that lines of different ranks never mix.
"""

import os
import select
import selectors
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Final, Literal

from mizzen.errors import LaunchError

CHUNK: Final = 1 << 16
TICK: Final = 0.05
ERROR_TAIL: Final = 1 << 18
"""Bytes of a rank's errors that are kept to find its traceback."""
PIPE_CAPACITY: Final = 1 << 20
"""Bytes that a pipe holds at most, as Linux has it."""
DRAIN_LIMIT: Final = 30.0
"""Seconds that the reader may take for what processes have written before they ended."""
LONGEST: Final = 1 << 20
"""Bytes after which a line is cut: a progress bar may draw for days and never end one."""
Pipe = Literal["out", "err"]


@dataclass(slots=True)
class ProcessOutput:
    """Where the output of one process goes."""

    prefix: bytes = b""
    """Before each line on the terminal."""
    is_shown: bool = False
    is_raw: bool = False
    """Pass everything through as it comes, progress bars included: for one that has the terminal to itself."""
    file: IO[bytes] | None = None
    error_tail: bytearray = field(default_factory=bytearray)
    """The end of what it wrote to standard error."""
    mark: bytes = b""
    """What begins a line that is for the launcher alone, and is not shown. Empty where there is none."""
    messages: list[str] = field(default_factory=list)
    """What followed the mark in such lines."""
    partial_lines: dict[Pipe, bytes] = field(default_factory=dict)

    def feed(self, data: bytes, pipe: Pipe) -> None:
        """Take what a pipe has brought; nothing means that it has ended."""
        if pipe == "err" and data:
            self.error_tail += data
            del self.error_tail[:-ERROR_TAIL]
        if self.is_shown and self.is_raw and data:
            write(pipe, data)
        lines = self._whole_lines(data, pipe)
        if self.mark:
            lines = [shown for line in lines if (shown := self._take_message(line))]
        if not lines:
            return
        if self.is_shown and not self.is_raw:
            write(pipe, b"".join(self.prefix + line for line in lines))
        self.keep(b"".join(lines))

    def keep(self, text: bytes) -> None:
        """Add to the file. One that takes no more is given up, and the job goes on without it."""
        if (file := self.file) is None:
            return
        try:
            file.write(text)
        except ValueError:
            return  # it was closed in this moment
        except OSError as error:
            say(f"warning: {file.name}: what the rank prints is no longer kept ({error.strerror})")
            self.close()

    def close(self) -> None:
        """Close the file; what still comes is shown and not kept."""
        file, self.file = self.file, None
        if file is not None:
            file.close()

    def _take_message(self, line: bytes) -> bytes:
        """What of a line is to be shown; one that a rank has left open may stand before the mark."""
        before, mark, word = line.partition(self.mark)
        if mark:
            self.messages.append(word.decode(errors="replace").rstrip())
            return before + b"\n" if before else b""
        return line

    def _whole_lines(self, data: bytes, pipe: Pipe) -> list[bytes]:
        text = self.partial_lines.pop(pipe, b"") + data
        *whole, rest = text.split(b"\n")  # a carriage return is no end: a progress bar draws over itself
        lines = [line + b"\n" for line in whole] + ([rest] if rest else [])
        if not data:
            return [line if line.endswith(b"\n") else line + b"\n" for line in lines]
        if lines and not lines[-1].endswith(b"\n"):
            if len(lines[-1]) < LONGEST:
                self.partial_lines[pipe] = lines.pop()
            else:
                lines[-1] += b"\n"
        return lines


def write(pipe: Pipe, data: bytes) -> None:
    """Write all of it to our own standard output or error."""
    descriptor = 1 if pipe == "out" else 2
    rest = memoryview(data)
    with suppress(OSError):  # who read the output has gone, or the disk is full; the job goes on
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:  # another program that has this terminal or pipe, too, has set it so
                select.select((), (descriptor,), ())


def open_standard_streams() -> None:
    """Open those of standard input, output and error that are closed, at nothing.

    What a process opens next gets the lowest free number. A pipe that lands on 0, 1 or 2 is lost in the first child
    that is given streams of its own.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


class PipeReader:
    """The thread that reads the pipes of some processes until all are closed."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="mizzen-output", daemon=True)
        self._drains: SimpleQueue[threading.Event] = SimpleQueue()

    def add(self, process: "subprocess.Popen[bytes]", output: ProcessOutput) -> None:
        """Read what this process writes, too."""
        pipes: tuple[tuple[IO[bytes] | None, Pipe], ...] = ((process.stdout, "out"), (process.stderr, "err"))
        for file, pipe in pipes:
            if file is None:
                raise AssertionError("a process whose output is read was started without pipes")
            os.set_blocking(file.fileno(), False)
            self._selector.register(file, selectors.EVENT_READ, (output, pipe))

    def start(self) -> None:
        """Begin, once all pipes are known."""
        self._thread.start()

    def drain(self, limit: float = DRAIN_LIMIT) -> None:
        """Wait until everything is taken that the pipes hold now.

        That is all that a process which has ended can have written, whoever else still has its pipes open. The limit is
        for a terminal that takes nothing more, so that the reader waits for it.
        """
        done, until = threading.Event(), time.monotonic() + limit
        self._drains.put(done)
        while self._thread.is_alive() and not done.wait(TICK) and time.monotonic() < until:
            pass

    def _run(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select(TICK):
                self._take(key)
            while not self._drains.empty():
                done = self._drains.get()
                for key in list(self._selector.get_map().values()):
                    left = PIPE_CAPACITY  # a process that goes on writing must not keep us here
                    while left > 0 and (taken := self._take(key)):
                        left -= taken
                done.set()

    def _take(self, key: selectors.SelectorKey) -> int:
        """Take a chunk out of a pipe; how long it was, 0 for a pipe that is empty or at its end."""
        output, pipe = key.data
        try:
            data = os.read(key.fd, CHUNK)
        except BlockingIOError:
            return 0
        output.feed(data, pipe)
        if not data:
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        return len(data)


def say(text: str, *, before: str = "", mark: str = "") -> None:
    """A line of the launcher's own, after what it speaks of, in one piece; a mark comes before each line."""
    shown = f"{before.rstrip()}\n" if before else ""
    lines = f"{shown}mizzen: {text}".split("\n")
    write("err", "".join(f"{mark}{line}\n" for line in lines).encode(errors="backslashreplace"))


def open_log(folder: Path, rank: int) -> IO[bytes]:
    """The file of one rank, which grows over the attempts."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / f"rank{rank}.log").open("ab", buffering=0)
    except OSError as error:
        raise LaunchError(f"--enable_each_rank_log {folder}: no file can be written there ({error})") from error
