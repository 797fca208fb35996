"""The ranks of one node in one attempt, as processes: start them, look at them, end them."""

import errno
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from mizzen.errors import LaunchError
from mizzen.launcher.failure import Failure
from mizzen.launcher.family import end_family, kill_group
from mizzen.launcher.keeper import Keeper
from mizzen.launcher.output import Outlet, Pump
from mizzen.launcher.stops import SAVED, UNSAVED
from mizzen.launcher.trace import last_words
from mizzen.progress import STACKS, Progress, Record, record_path, stacks_path

PATIENCE: Final = 3.0
"""Seconds between asking a rank to end and ending it."""
TICK: Final = 0.02
PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Order:
    """How one rank is to be started."""

    rank: int
    local_rank: int
    words: tuple[str, ...]
    environment: dict[str, str]
    outlet: Outlet
    is_python: bool = True


@dataclass(slots=True)
class Member:
    """One rank that was started."""

    order: Order
    process: "subprocess.Popen[bytes]"
    resident: int = 0

    @property
    def status(self) -> int | None:
        """How it ended; None while it runs."""
        return self.process.poll()


@dataclass(slots=True)
class Crew:
    """All ranks of this node."""

    host: str
    folder: Path
    keeper: Keeper
    members: list[Member] = field(default_factory=list)
    pump: Pump = field(default_factory=Pump)

    def start(self, orders: Sequence[Order], folder: str) -> None:
        """Start every rank. The thread that calls this is the one whose end ends them."""
        bind = self.keeper.binding()

        def prepare() -> None:
            bind()
            signal.signal(STACKS, signal.SIG_IGN)  # a rank that answers not yet, or no more, must outlive the question

        for order in orders:
            try:
                process = subprocess.Popen(
                    order.words,
                    env=order.environment,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    start_new_session=True,
                    preexec_fn=prepare,
                )
            except OSError as error:
                self.end(signal.SIGKILL)
                size = f" ({_size(order)})" if error.errno == errno.E2BIG else ""
                raise LaunchError(
                    f"{order.words[0]} cannot be started in {folder} on {self.host}: {error}{size}"
                ) from error
            self.members.append(Member(order, process))
            for pipe, stream in ((process.stdout, "out"), (process.stderr, "err")):
                self.pump.add(_present(pipe), order.outlet, "out" if stream == "out" else "err")
        self.pump.start()

    @property
    def is_done(self) -> bool:
        """Whether every rank has ended well."""
        return all(member.status == 0 for member in self.members)

    @property
    def is_over(self) -> bool:
        """Whether every rank has ended."""
        return all(member.status is not None for member in self.members)

    def stopped(self, is_asked: bool) -> list[int]:
        """The exit codes of ranks that have stopped because they were asked; `is_asked` says that all of them were.

        A script may leave with the same codes for reasons of its own, and has then failed.
        """
        return [member.process.returncode for member in self.members if self._has_stopped(member, is_asked)]

    def _has_stopped(self, member: Member, is_asked: bool) -> bool:
        is_stop = member.status in (SAVED, UNSAVED)
        return is_stop and (is_asked or Progress.was_asked_to_stop(self._record(member)))

    def failures(self, is_asked: bool) -> list[Failure]:
        """Every rank that has ended otherwise than well or because it was asked to."""
        ended = [member for member in self.members if member.status not in (None, 0)]
        failed = [member for member in ended if not self._has_stopped(member, is_asked)]
        if failed:
            time.sleep(5 * TICK)  # its last words may still be on their way through the pipe
        return [self._failure(member) for member in failed]

    def _failure(self, member: Member) -> Failure:
        order, status = member.order, member.process.returncode
        text = order.outlet.kept.decode(errors="replace")
        words = last_words(text, status, is_python=order.is_python, is_shown=order.outlet.is_shown)
        return Failure(order.rank, self.host, status, words, member.resident)

    def weigh(self) -> None:
        """Note how much memory each rank has now, in case it is killed for it."""
        for member in self.members:
            with suppress(OSError, ValueError, IndexError):
                statm = Path(f"/proc/{member.process.pid}/statm").read_text().split()
                member.resident = int(statm[1]) * PAGE

    def records(self, *, ended: bool = False) -> list[tuple[Member, Record]]:
        """Where the ranks are that say it, or where those were that have ended."""
        members = (member for member in self.members if (member.status is not None) == ended)
        found = ((member, Progress.read(self._record(member))) for member in members)
        return [(member, record) for member, record in found if record is not None]

    def ask_to_stop(self) -> None:
        """Ask every rank to save and stop, at the end of a step that they agree on."""
        for member in self.members:
            with suppress(OSError):
                Progress.ask_to_stop(self._record(member))

    def send(self, number: int) -> None:
        """Send a signal to every rank."""
        for member in self.members:
            if member.status is None:
                kill_group(member.process.pid, number)

    def stacks(self, wait: float = 1.0) -> dict[int, str]:
        """What every rank is doing, by its own account: the stacks of all its threads, by global rank."""
        before = {member.order.rank: len(self._written(member)) for member, _ in self.records()}
        asked = [member for member in self.members if member.order.rank in before]

        def stack(member: Member) -> str:
            return self._written(member)[before.get(member.order.rank, 0) :]

        for member in asked:
            with suppress(ProcessLookupError):
                os.kill(member.process.pid, STACKS)
        until = time.monotonic() + wait
        while time.monotonic() < until and any(not stack(member) for member in asked):
            time.sleep(TICK)
        time.sleep(TICK)  # the last of them may still be writing
        return {member.order.rank: _main_thread(stack(member)) or _state(member.process.pid) for member in self.members}

    def _written(self, member: Member) -> str:
        """All stacks that a rank has ever written."""
        with suppress(OSError):
            return stacks_path(self.folder, member.order.local_rank).read_text(errors="replace")
        return ""

    def _record(self, member: Member) -> Path:
        return record_path(self.folder, member.order.local_rank)

    def end(self, number: int = signal.SIGTERM, patience: float = PATIENCE) -> None:
        """Ask what still runs to end, wait a little, end it; nothing of what they have started is left."""
        for member, record in self.records():
            if record.step >= 0:  # it takes a request to end for one to save, and has nothing to tidy up otherwise
                member.process.kill()
        if number != signal.SIGKILL:
            self.send(number)
            until = time.monotonic() + patience
            while not self.is_over and time.monotonic() < until:
                time.sleep(TICK)
        end_family([member.process.pid for member in self.members], [self.folder])
        for member in self.members:
            member.process.wait()
            self.keeper.forget(member.process.pid)
        self.pump.finish()
        for member in self.members:
            if member.order.outlet.file is not None:
                member.order.outlet.file.close()


def _size(order: Order) -> str:
    """How long what a rank is given is, and may be."""
    sizes = [len(os.fsencode(word)) + 1 for word in order.words]
    sizes += [len(os.fsencode(f"{name}={value}")) + 1 for name, value in order.environment.items()]
    return (
        f"its arguments and variables have {sum(sizes):,} bytes, the longest of them {max(sizes):,}; this system "
        f"allows {os.sysconf('SC_ARG_MAX'):,} in all and {32 * PAGE:,} for one: put what is long into a file"
    )


def _main_thread(stacks: str) -> str:
    """Of all threads the one that the signal has reached, which is the one that trains."""
    before, mark, after = stacks.partition("Current thread")
    return mark + after.partition("\n\n")[0] if mark else before


def _state(pid: int) -> str:
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return "the process is stopped (SIGSTOP)" if state in "Tt" else "it gives no stack"
    return "it has ended"


def _present(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise AssertionError("a process that was started with pipes has none")
    return pipe
