"""How an attempt ended, what follows from it, and the note of it that the run's own records get."""

import json
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from mizzen.launcher.failure import Failure
from mizzen.launcher.stops import SAVED, UNSAVED
from mizzen.monitor.output import LineFile
from mizzen.progress import announced_run

Kind = Literal["done", "saved", "unsaved", "stopped", "changed", "failed", "lost"]


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one attempt on one node."""

    kind: Kind
    failure: Failure | None = None
    is_ours: bool = True
    """Whether the failed rank ran on this node."""
    signal: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """What the supervisor does next."""

    code: int | None
    """Leave with this exit code; None makes another attempt."""
    words: str = ""
    """What it says."""
    trace: str = ""
    """What it shows before that."""


def decide(ending: Ending, *, max_restarts: int, was_asked: bool, is_elastic: bool) -> Move:
    """What follows: `was_asked` says whether this very supervisor was told to stop."""
    if ending.kind == "done":
        return Move(0)
    if ending.kind in ("saved", "unsaved") and is_elastic and not was_asked:
        return Move(None, "other nodes leave or join; this one goes on")
    if ending.kind == "saved":
        return Move(SAVED, "saved and stopped")
    if ending.kind == "unsaved":
        return Move(UNSAVED, ending.reason or "stopped; nothing could be saved")
    if ending.kind == "stopped":
        return Move(128 + ending.signal, ending.reason)
    if ending.kind == "changed":
        return Move(None, f"{ending.reason or 'nodes join or leave'}: the ranks start again")
    if ending.kind == "lost" or ending.failure is None:
        return Move(UNSAVED if was_asked else 1, ending.reason)
    return _after(ending.failure, ending.is_ours, max_restarts=max_restarts, was_asked=was_asked)


def _after(failure: Failure, is_ours: bool, *, max_restarts: int, was_asked: bool) -> Move:
    code: int | None = failure.code
    words = str(failure)
    if failure.number <= max_restarts and not was_asked:
        code, words = None, f"{failure}; restart {failure.number} of {max_restarts}"
    # The node whose rank it was speaks for all.
    return Move(code, words, failure.trace) if is_ours else Move(code)


def note_ending(attempt: Path, host: str, move: Move) -> None:
    """Write how an attempt ended beside the records of its ranks, for `mizzen watch`; without any of them, nowhere."""
    folder = announced_run(attempt)
    if folder is None or not move.words:
        return
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": time, "kind": "ending", "host": host, "code": move.code, "text": move.words})
    with suppress(OSError):  # how a job ends does not depend on a note of it
        file = LineFile(folder / f"launcher-{host.replace('/', '_')}.jsonl")
        file.append(line)
        file.close()
