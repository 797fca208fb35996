"""Runs as they lie on disk: the numbers of their steps, the records of their ranks, and what follows from both.

Whatever is read here was written by others. A line that is no JSON, or not of our kind, is passed over and counted.
"""

import json
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from mizzen.errors import UsageError
from mizzen.monitor.rank_record import ranks_folder
from mizzen.watch.series import Series
from mizzen.watch.tail import Tail
from mizzen.wording import and_more, duration, rank_list

MOST_NAMES: Final = 256
"""Numbers that are kept of a run. A run that writes one for each layer is read; what is above is only counted."""
MOST_MARKS: Final = 500
RANK_BUCKETS: Final = 256
SILENT_AFTER: Final = 3
"""Heartbeats that a rank may miss."""
LONGEST_TEXT: Final = 20_000
NOT_DRAWN: Final = {"time", "step", "applied", "reason", "event", "global_samples"}


@dataclass(slots=True)
class Mark:
    """Something that happened at one moment: a start, a restart, a checkpoint, a skipped step, a failure."""

    time: float
    step: float | None
    """None where the one who wrote it knows no steps: those of the numbers before it count."""
    kind: str
    text: str
    revision: int


@dataclass(slots=True)
class Rank:
    """What a rank last said of itself."""

    time: float = 0.0
    kind: str = "start"
    host: str = ""
    step: int = -1
    where: str = ""
    memory: float | None = None
    error: str = ""
    heartbeat: float = 0.0

    def state(self, now: float) -> str:
        """`alive`, `silent`, `ended` or `failed`; a rank without a heartbeat counts as alive until it ends."""
        if self.kind == "end":
            return "failed" if self.error else "ended"
        is_late = self.heartbeat > 0 and now - self.time > SILENT_AFTER * self.heartbeat + 1
        return "silent" if is_late else "alive"


@dataclass(slots=True)
class Run:
    """Reads on when it is told to, and answers what has changed since it was last asked."""

    events: Path
    name: str
    series: dict[str, Series] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    ranks: dict[int, Rank] = field(default_factory=dict)
    memory: dict[int, Series] = field(default_factory=dict)
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MOST_MARKS))
    plan: Mapping[str, Any] = field(default_factory=dict)
    plan_revision: int = 0
    world: int = 0
    step: int = 0
    heard: float = 0.0
    """When the last line was written."""
    ending: Mapping[str, Any] | None = None
    """What the launcher said of the end of the last attempt."""
    unlisted: int = 0
    unreadable: int = 0
    _started: float = 0.0
    _is_first_step: bool = True
    _tails: dict[Path, Tail] = field(default_factory=dict)

    def read(self, revision: int) -> bool:
        """Take in a chunk of each file. True when there is more to read at once."""
        self._tails.setdefault(self.events, Tail(self.events))
        for path in sorted(ranks_folder(self.events).glob("*.jsonl")):
            self._tails.setdefault(path, Tail(path))
        is_more = False
        for tail in self._tails.values():
            before, lines = tail.offset, tail.read()
            is_more |= tail.offset != before and tail.left > 0
            if tail.path == self.events:
                self._take_steps(lines, revision)
            else:
                self._take_notes(tail.path.stem, lines, revision)
        return is_more

    @property
    def share_read(self) -> float:
        """How much of what is there was read, from 0 to 1."""
        size = sum(tail.size for tail in self._tails.values())
        return 1.0 - sum(tail.left for tail in self._tails.values()) / size if size else 1.0

    # Steps

    def _take_steps(self, lines: list[bytes], revision: int) -> None:
        columns: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
        for line in self._parsed(lines):
            at = _moment(line.get("time"))
            if at is None:
                self.unreadable += 1
                continue
            if at > self.heard:
                self.heard = at
            for name, value in _event(line) if "event" in line else self._step(line, at, revision):
                columns[name].append((at, self.step, value))
        for name, points in columns.items():
            if name not in self.series:
                if len(self.series) >= MOST_NAMES:
                    self.unlisted += len(points)
                    continue
                self.series[name] = Series()
            self.series[name].extend(points, revision)
            self.latest[name] = points[-1][2]

    def _step(self, line: Mapping[str, Any], at: float, revision: int) -> Iterable[tuple[str, float]]:
        step = _number(line.get("step"))
        if step is None or not math.isfinite(step):
            self.unreadable += 1
            return ()
        self.step = int(step)
        if line.get("applied") is False:
            self._mark(at, "skip", _short(line.get("reason")), revision, step)
        named = dict(_flat(line))
        seconds, tokens = named.get("seconds", 0.0), named.get("tokens", 0.0)
        if tokens and seconds and not self._is_first_step:  # the time of the first one includes the start of the run
            named.setdefault("tokens_per_sec", tokens / seconds)
        self._is_first_step = False
        return named.items()

    # Ranks

    def _take_notes(self, author: str, lines: list[bytes], revision: int) -> None:
        """Lines of `rank-3`, or of `launcher-node1`."""
        number = author.removeprefix("rank-")
        for line in self._parsed(lines):
            at = _moment(line.get("time"))
            if at is None:
                self.unreadable += 1
                continue
            self.heard = max(self.heard, at)
            if number.isascii() and number.isdigit():
                self._take_rank(int(number), line, at, revision)
            elif line.get("kind") == "ending":
                self._take_ending(line, at, revision)

    def _take_rank(self, number: int, line: Mapping[str, Any], at: float, revision: int) -> None:
        kind = line.get("kind")
        if kind == "start":
            self._take_start(number, line, at, revision)
        elif kind == "load" and number == 0:
            self._mark(at, "load", f"went on after step {_short(line.get('step'))}", revision)
        elif kind == "save":
            self._mark(at, "save", _short(line.get("tag")), revision, _finite(line.get("step")))
        rank = self.ranks.setdefault(number, Rank())
        rank.time = max(rank.time, at)
        if kind not in ("beat", "end"):
            return
        rank.kind, rank.error = kind, _short(line.get("error"))
        rank.step = int(_finite(line.get("step")))
        words = (line.get("phase"), line.get("unit"), f"waits in {line['waiting']}" if line.get("waiting") else "")
        rank.where = _short(" ".join(str(word) for word in words if word))
        memory = line.get("memory")
        if isinstance(memory, Mapping) and (used := _finite(memory.get("allocated"))):
            rank.memory = used
            series = self.memory.setdefault(number, Series(RANK_BUCKETS))
            series.extend([(at, float(rank.step), used)], revision)

    def _take_start(self, number: int, line: Mapping[str, Any], at: float, revision: int) -> None:
        self.ranks[number] = Rank(at, host=_short(line.get("host")), heartbeat=_finite(line.get("heartbeat")))
        if number:
            return
        self._mark(at, "restart" if self._started else "start", f"{_short(line.get('world'))} ranks", revision)
        self._started, self._is_first_step = at, True
        self.world = int(_finite(line.get("world")))
        plan = line.get("plan")
        if isinstance(plan, Mapping):
            self.plan, self.plan_revision = _plan(plan), revision

    def _take_ending(self, line: Mapping[str, Any], at: float, revision: int) -> None:
        text = _short(line.get("text"))
        self.ending = {"time": at, "code": line.get("code"), "text": text}
        self._mark(at, "end", text, revision)

    def _mark(self, at: float, kind: str, text: str, revision: int, step: float | None = None) -> None:
        self.marks.append(Mark(at, step, kind, text, revision))

    def _parsed(self, lines: list[bytes]) -> list[dict[str, Any]]:
        """Lines as records, without those that are none."""
        try:
            found = json.loads(b"[%b]" % b",".join(lines))  # all at once is three times as quick as one by one
        except (ValueError, RecursionError):
            found = []
        if len(found) != len(lines):
            found = [_one(line) for line in lines]
        records = [record for record in found if isinstance(record, dict)]
        self.unreadable += len(found) - len(records)
        return records

    # What follows

    def state(self, now: float) -> tuple[str, str]:
        """`running`, `finished`, `failed`, `silent` or `empty`, and a sentence about it."""
        shown = {number: rank for number, rank in self.ranks.items() if number < self.world}
        states = {number: rank.state(now) for number, rank in shown.items()}
        ending = self.ending if self.ending is not None and self.ending["time"] >= self._started else None
        if ending is not None and ending["code"] not in (None, 0, 75):
            return "failed", ending["text"]
        if failed := [number for number, state in states.items() if state == "failed"]:
            silent = [number for number, state in states.items() if state in ("silent", "alive")]
            words = and_more([f"rank {number}: {shown[number].error}" for number in failed], 4, separator="; ")
            return "failed", f"{words}; {rank_list(silent, 4)} left no word" if silent else words
        if ending is not None:
            return "finished" if ending["code"] is not None else "running", ending["text"]
        if silent := [number for number, state in states.items() if state == "silent"]:
            longest = max(now - shown[number].time for number in silent)
            return "silent", f"{rank_list(silent, 4)} not heard of for {duration(longest)}"
        if states and all(state == "ended" for state in states.values()):
            return "finished", f"all {len(states)} ranks ended well"
        if not self.heard:
            return "empty", f"nothing to read yet in {self.events}"
        return "running", f"last heard of {duration(max(0.0, now - self.heard))} ago"

    def _step_of(self, mark: Mark) -> float:
        known = self.series.get("samples")
        return mark.step if mark.step is not None else known.step_at(mark.time) if known is not None else 0.0

    def since(self, revision: int) -> dict[str, Any]:
        """What a page that knows everything up to a revision has to be told."""
        now = time.time()
        state, words = self.state(now)
        shown = sorted((number, rank) for number, rank in self.ranks.items() if number < max(self.world, 1))
        changed = {name: series.since(revision) for name, series in self.series.items()}
        memory = {str(number): self.memory[number].since(revision) for number, _ in shown if number in self.memory}
        return {
            "name": self.name,
            "state": state,
            "words": words,
            "step": self.step,
            "heard": self.heard,
            "world": self.world,
            "read": self.share_read,
            "passed_over": self.unreadable + self.unlisted,
            "latest": {name: value if math.isfinite(value) else str(value) for name, value in self.latest.items()},
            "series": {name: columns for name, columns in changed.items() if columns["time"]},
            "memory": {number: columns for number, columns in memory.items() if columns["time"]},
            "ranks": [
                {
                    "rank": number,
                    "state": rank.state(now),
                    "ago": max(0.0, now - rank.time),
                    "host": rank.host,
                    "step": rank.step,
                    "where": rank.where,
                    "memory": rank.memory,
                    "error": rank.error,
                }
                for number, rank in shown
            ],
            "marks": [
                {"time": mark.time, "step": self._step_of(mark), "kind": mark.kind, "text": mark.text}
                for mark in self.marks
                if mark.revision > revision
            ],
            "plan": self.plan if self.plan_revision > revision else None,
        }


def find_runs(given: list[str]) -> list[Run]:
    """The runs that paths name: a file of events, the same without its ending, or a folder with some of them."""
    files: list[Path] = []
    for word in given:
        path = Path(word)
        beside = path.parent / f"{path.name}.jsonl"
        if path.is_dir() and not beside.is_file():
            found = sorted(path.glob("*.jsonl"))
            if not found:
                raise UsageError(f"{word}: no run is here; jsonl_monitor writes <output_path>/<job_name>.jsonl")
            files += found
        elif path.is_file() or beside.is_file():
            files.append(path if path.is_file() else beside)
        else:
            raise UsageError(
                f"{word}: there is no such file; a run writes one with "
                '"jsonl_monitor": {"enabled": true, "output_path": ..., "job_name": ...}'
            )
    files = list(dict.fromkeys(files))
    stems = [path.stem for path in files]
    return [Run(path, path.stem if stems.count(path.stem) == 1 else str(path.parent / path.stem)) for path in files]


def _one(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _event(line: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """The one number of a line that a user has written."""
    value = _number(line.get("value"))
    return ((_short(line["event"]), value),) if value is not None else ()


def _flat(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number of a step by its name; those of `measures` have names of their own."""
    for key, value in line.items():
        if key in NOT_DRAWN:
            continue
        if isinstance(value, Mapping):
            before = "" if key == "measures" else f"{key}."
            for inner, deeper in value.items():
                if (number := _number(deeper)) is not None:
                    yield _short(f"{before}{inner}"), number
        else:
            number = _number(value[0] if isinstance(value, list) and value else value)
            if number is not None:
                yield _short(key), number


def _plan(given: Mapping[str, Any]) -> dict[str, Any]:
    """A plan as the page draws it: texts and numbers, whatever the file says."""
    numbers = {
        key: {_short(name): _finite(value) for name, value in list(given[key].items())[:16]}
        for key in ("layout", "cost")
        if isinstance(given.get(key), Mapping)
    }
    return {"text": _short(given.get("text")), "layout": {}, "cost": {}, **numbers}


def _number(value: Any) -> float | None:
    """A number, also one that is written as the text "nan" or "inf"; None for all else."""
    if type(value) is float:  # nearly always, and there may be many millions
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _finite(value: Any) -> float:
    """A number to count with; 0 for all else."""
    number = _number(value)
    return number if number is not None and math.isfinite(number) else 0.0


def _moment(value: Any) -> float | None:
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _short(value: Any) -> str:
    return value[:LONGEST_TEXT] if isinstance(value, str) else str(value)[:LONGEST_TEXT] if value is not None else ""


PAUSE: Final = 0.5
"""Seconds between two looks at files that have not grown."""


class Watcher:
    """Each look has a number, the revision; who asks names the last one it has heard of, 0 at first."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)
        self._revision = 0
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    def look(self) -> bool:
        """Read on in every run. True when there is more to read at once."""
        more = False
        for run in self.runs:
            with self._lock:
                self._revision += 1
                more |= run.read(self._revision)
        return more

    def read_all(self) -> None:
        """Read everything that is there now."""
        while self.look():
            pass

    def since(self, revision: int) -> dict[str, Any]:
        """What has changed after a revision, and the revision to ask with next."""
        with self._lock:
            runs = [run.since(revision) for run in self.runs]
            return {"revision": self._revision, "now": time.time(), "runs": runs}

    def start(self) -> None:
        """Read on from now until `close`."""
        threading.Thread(target=self._follow, name="mizzen-watch", daemon=True).start()

    def close(self) -> None:
        """Stop reading."""
        self._is_over.set()

    def _follow(self) -> None:
        while not self._is_over.is_set():
            if not self.look():
                self._is_over.wait(PAUSE)
