"""What ranks print: some of it to the terminal, all of it to files when asked, and the end of it kept for the report.

One thread reads all pipes. A line is written in one piece, so that lines of different ranks never mix.
"""

import os
import select
import selectors
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Literal

from mizzen.errors import LaunchError

CHUNK: Final = 1 << 16
KEPT: Final = 1 << 18
"""Bytes of a rank's errors that are kept to find its traceback."""
LONGEST: Final = 1 << 20
"""Bytes after which a line is cut: a progress bar may draw for days and never end one."""
Stream = Literal["out", "err"]


@dataclass(slots=True)
class Outlet:
    """Where the output of one rank goes."""

    prefix: bytes = b""
    """Before each line on the terminal."""
    is_shown: bool = False
    is_raw: bool = False
    """Pass everything through as it comes, progress bars included: for one that has the terminal to itself."""
    file: IO[bytes] | None = None
    kept: bytearray = field(default_factory=bytearray)
    """The end of what it wrote to standard error."""
    mark: bytes = b""
    """What begins a line that is for the launcher alone: it is heard, not shown. Empty where there is none."""
    heard: list[str] = field(default_factory=list)
    open_line: dict[Stream, bytes] = field(default_factory=dict)

    def feed(self, data: bytes, stream: Stream) -> None:
        """Take what a pipe has brought; nothing means that it has ended."""
        if stream == "err" and data:
            self.kept += data
            del self.kept[:-KEPT]
        if self.is_shown and self.is_raw and data:
            write(stream, data)
        lines = self._whole_lines(data, stream)
        if self.mark:
            lines = [shown for line in lines if (shown := self._hear(line))]
        if not lines:
            return
        if self.is_shown and not self.is_raw:
            write(stream, b"".join(self.prefix + line for line in lines))
        self.keep(b"".join(lines))

    def keep(self, text: bytes) -> None:
        """Add to the file. One that takes no more is given up, and the job goes on without it."""
        if self.file is None:
            return
        try:
            self.file.write(text)
        except OSError as error:
            say(f"warning: {self.file.name}: what the rank prints is no longer kept ({error.strerror})")
            self.file.close()
            self.file = None

    def _hear(self, line: bytes) -> bytes:
        """What of a line is to be shown; one that a rank has left open may stand before the mark."""
        before, mark, word = line.partition(self.mark)
        if mark:
            self.heard.append(word.decode(errors="replace").rstrip())
            return before + b"\n" if before else b""
        return line

    def _whole_lines(self, data: bytes, stream: Stream) -> list[bytes]:
        text = self.open_line.pop(stream, b"") + data
        lines = text.splitlines(keepends=True) if b"\r" not in text else _split(text)
        if not data:
            return [line if line.endswith(b"\n") else line + b"\n" for line in lines]
        if lines and not lines[-1].endswith(b"\n"):
            if len(lines[-1]) < LONGEST:
                self.open_line[stream] = lines.pop()
            else:
                lines[-1] += b"\n"
        return lines


def _split(text: bytes) -> list[bytes]:
    """Lines by newline alone: a carriage return is a progress bar that draws over itself."""
    return [line + b"\n" for line in text.split(b"\n")[:-1]] + ([last] if (last := text.split(b"\n")[-1]) else [])


def write(stream: Stream, data: bytes) -> None:
    """Write all of it to our own standard output or error."""
    descriptor = 1 if stream == "out" else 2
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


class Pump:
    """The thread that reads the pipes of the ranks of one attempt until all are closed."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="mizzen-output", daemon=True)

    def add(self, pipe: IO[bytes], outlet: Outlet, stream: Stream) -> None:
        """Read this pipe too."""
        os.set_blocking(pipe.fileno(), False)
        self._selector.register(pipe, selectors.EVENT_READ, (outlet, stream))

    def start(self) -> None:
        """Begin, once all pipes are known."""
        self._thread.start()

    def finish(self, patience: float = 2.0) -> None:
        """Wait for what is still in the pipes. A grandchild may hold one open, so not for ever."""
        if self._thread.ident is not None:
            self._thread.join(patience)

    def _run(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                outlet, stream = key.data
                data = os.read(key.fd, CHUNK)
                outlet.feed(data, stream)
                if not data:
                    self._selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]


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
