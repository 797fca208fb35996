"""How ranks and attempts end, which traceback tells why, and what the supervisor does next.

[Note: which traceback]
A script may log errors that it has dealt with, and a Python that ends may complain of callbacks, threads and workers
after the error that ended it. Only an exception that nobody caught ends Python with 1, or with a crash on the way out;
another exit code was the script's own choice. Of several tracebacks the one counts that torch has marked with the rank
(only its hook for uncaught errors does), else the last that begins where a program begins, else the last without a
line before it that says it is an aside.
"""

import json
import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, NamedTuple

from mizzen.launcher.signals import SAVED, UNSAVED
from mizzen.monitor.output import LineFile
from mizzen.progress import announced_run
from mizzen.wording import gib, rank_in_role

SECONDARY: Final = re.compile(
    r"CommError|Connection (?:closed|reset) by peer|Broken pipe|DistNetworkError|DistBackendError|ncclRemoteError"
)
"""What the last line of a rank says that died because another one did."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a rank that was not meant to end so."""

    rank: int
    host: str
    status: int
    """As Python gives it: an exit code, or minus the number of a signal."""
    trace: str = ""
    resident: int = 0
    """Bytes of memory that it was last seen with."""
    cause: str = ""
    """What is known beside the status: a hang, with who is where."""
    number: int = 1
    """Which failure of the job this is, counted from 1."""
    role: str = ""
    """Which part of the model the rank had, as it has said itself."""

    @property
    def code(self) -> int:
        """The exit code of the launcher."""
        return 128 - self.status if self.status < 0 else self.status

    @property
    def is_secondary(self) -> bool:
        """Whether another rank is likely to have failed first."""
        last = self.trace.rstrip().splitlines()[-1:]
        return self.status > 0 and any(SECONDARY.search(line) for line in last)

    def __str__(self) -> str:
        return f"{rank_in_role(self.rank, self.role)} on {self.host} {self._end()}"

    def _end(self) -> str:
        if self.cause:
            return self.cause
        if self.status >= 0:
            return f"ended with exit code {self.status}"
        name = signal.Signals(-self.status).name if -self.status in signal.valid_signals() else f"signal {-self.status}"
        said = f"was ended by signal {-self.status} ({name})"
        if self.status == -signal.SIGKILL:
            size = f"; it was last seen with {gib(self.resident)} resident" if self.resident else ""
            said += f": most often the kernel, because the host was out of memory{size}"
        if self.status in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT):
            said += ": a crash in compiled code"
        return said


def root_cause(failures: Iterable[Failure]) -> Failure:
    """Which of several failures is the cause: not one that only tells of another, and a signal before an error."""
    return min(failures, key=lambda failure: (failure.is_secondary, failure.status > 0, failure.rank))


MARK: Final = re.compile(r"\[rank\d+\]: ?")
"""What torch puts before each line of an error that nobody caught."""
START: Final = re.compile(r"(?:  \+ Exception Group |Original )?Traceback \(most recent call last\):")
TOP: Final = re.compile(r'\s*[|]?\s*File "(?:.*, in <module>$|<frozen runpy>)')
"""The first frame of a program."""
LINKS: Final = ("direct cause of the following", "another exception occurred", "terminated with the following error")
ASIDE: Final = re.compile(
    r"Exception ignored|Error in atexit|Exception in thread|--- Logging error|(?:Fork|Spawn|ForkServer)?Process \S+:$"
)
UNCAUGHT: Final = (1, -signal.SIGINT, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV)
"""How Python ends after an exception that nobody caught."""
LONGEST: Final = 80
"""Lines of a traceback that are shown."""


class TracebackRange(NamedTuple):
    """A traceback with those that led to it, as a range of lines. The largest in order is the likeliest to count."""

    is_marked: bool
    is_top: bool
    is_own: bool
    first: int
    end: int


def last_words(text: str, status: int, *, is_python: bool, is_shown: bool) -> str:
    """What tells why a rank has ended: its traceback, else the end of its errors, unless they were shown."""
    trace = traceback_in(text) if status in UNCAUGHT or not is_python else ""
    return trace or ("" if is_shown else end_of(text))


def traceback_in(text: str) -> str:
    """The traceback that counts, with those that led to it; empty when there is none."""
    raw = [line.rstrip("\r") for line in text.split("\n")]
    lines = [MARK.sub("", line, count=1) if MARK.match(line) else line for line in raw]
    found: list[TracebackRange] = []
    for place, line in enumerate(lines):
        if not START.match(line):
            continue
        one = _traceback_at(raw, lines, place)
        between = lines[found[-1].end : place] if found else []
        if found and (line.startswith("Original") or any(link in text for text in between for link in LINKS)):
            found[-1] = found[-1]._replace(end=one.end, is_top=found[-1].is_top or one.is_top)
        else:
            found.append(one)
    if not found:
        return ""
    kept = lines[max(found).first : max(found).end]
    cut = len(kept) - LONGEST
    return "\n".join(kept if cut <= 0 else [*kept[: LONGEST // 2], f"  ... {cut} lines ...", *kept[-LONGEST // 2 :]])


def _traceback_at(raw: list[str], lines: list[str], first: int) -> TracebackRange:
    """The traceback that begins at a line. Its end is the error, with the lines that are indented below it."""
    end = first + 1
    while end < len(lines) and (not lines[end] or lines[end][0].isspace()):
        end += 1
    end += 1
    is_marked = bool(MARK.match(raw[first]))
    while end < len(lines) and (MARK.match(raw[end]) if is_marked else lines[end][:1].isspace()):
        end += 1
    before = next((line for line in reversed(lines[:first]) if line.strip()), "")
    is_top = first + 1 < len(lines) and bool(TOP.match(lines[first + 1]))
    return TracebackRange(is_marked, is_top, not ASIDE.match(before), first, min(end, len(lines)))


def end_of(text: str, most: int = 20) -> str:
    """The last lines of a text; of a progress bar only what it drew last."""
    lines = [line.rstrip().rpartition("\r")[2] for line in text.rstrip().split("\n")]
    return "\n".join(lines[-most:])


Kind = Literal["done", "saved", "unsaved", "stopped", "changed", "failed", "lost"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one attempt on one node."""

    kind: Kind
    failure: Failure | None = None
    is_ours: bool = True
    """Whether the failed rank ran on this node."""
    signal: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NextAction:
    """What the supervisor does next."""

    code: int | None
    """Leave with this exit code; None makes another attempt."""
    words: str = ""
    """What it says."""
    trace: str = ""
    """What it shows before that."""


def decide(outcome: Outcome, *, max_restarts: int, was_asked: bool, is_elastic: bool) -> NextAction:
    """What follows: `was_asked` says whether this very supervisor was told to stop."""
    if outcome.kind == "done":
        return NextAction(0)
    if outcome.kind in ("saved", "unsaved") and is_elastic and not was_asked:
        return NextAction(None, "other nodes leave or join; this one goes on")
    if outcome.kind == "saved":
        return NextAction(SAVED, "saved and stopped")
    if outcome.kind == "unsaved":
        return NextAction(UNSAVED, outcome.reason or "stopped; nothing could be saved")
    if outcome.kind == "stopped":
        return NextAction(128 + outcome.signal, outcome.reason)
    if outcome.kind == "changed":
        return NextAction(None, f"{outcome.reason or 'nodes join or leave'}: the ranks start again")
    if outcome.kind == "lost" or outcome.failure is None:
        return NextAction(UNSAVED if was_asked else 1, outcome.reason)
    failure = outcome.failure
    code: int | None = failure.code
    words = str(failure)
    if failure.number <= max_restarts and not was_asked:
        code, words = None, f"{failure}; restart {failure.number} of {max_restarts}"
    # The node whose rank it was speaks for all.
    return NextAction(code, words, failure.trace) if outcome.is_ours else NextAction(code)


def record_outcome(attempt: Path, host: str, action: NextAction) -> None:
    """Write how an attempt ended beside the records of its ranks, for `mizzen watch`; without any of them, nowhere."""
    folder = announced_run(attempt)
    if folder is None or not action.words:
        return
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": time, "kind": "ending", "host": host, "code": action.code, "text": action.words})
    with suppress(OSError):  # how a job ends does not depend on a note of it
        file = LineFile(folder / f"launcher-{host.replace('/', '_')}.jsonl")
        file.append(line)
        file.close()
