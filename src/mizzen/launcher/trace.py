"""Which traceback tells why a rank has ended, found in what it wrote to standard error. Pure.

[Note: which traceback]
A script may log errors that it has dealt with, and a Python that ends may complain of callbacks, threads and workers
after the error that ended it. Only an exception that nobody caught ends Python with 1, or with a crash on the way out;
another exit code was the script's own choice. Of several tracebacks the one counts that torch has marked with the rank
(only its hook for uncaught errors does), else the last that begins where a program begins, else the last without a
line before it that says it is an aside.
"""

import re
import signal
from typing import Final, NamedTuple

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


class Found(NamedTuple):
    """A traceback with those that led to it, as a range of lines. The largest is the likeliest to count."""

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
    found: list[Found] = []
    for place, line in enumerate(lines):
        if not START.match(line):
            continue
        one = _found(raw, lines, place)
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


def _found(raw: list[str], lines: list[str], first: int) -> Found:
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
    return Found(is_marked, is_top, not ASIDE.match(before), first, min(end, len(lines)))


def end_of(text: str, most: int = 20) -> str:
    """The last lines of a text; of a progress bar only what it drew last."""
    lines = [line.rstrip().rpartition("\r")[2] for line in text.rstrip().split("\n")]
    return "\n".join(lines[-most:])
