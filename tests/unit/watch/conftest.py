"""Runs as they lie on disk, made of lines."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from mizzen.watch.run import Watcher, find_runs

BEGIN = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Written:
    """A run that a test writes, and what is read of it."""

    def __init__(self, folder: Path, name: str = "run") -> None:
        self.events = folder / f"{name}.jsonl"
        self.ranks = folder / f"{name}.ranks"
        self.events.touch()
        self.watcher = Watcher(find_runs([str(self.events)]))

    def write(self, author: str | None = None, /, at: float = 0.0, **facts) -> None:
        """A line of the events, or of `rank-0` and its like."""
        path = self.events if author is None else self.ranks / f"{author}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps({"time": (BEGIN + timedelta(seconds=at)).isoformat(), **facts}) + "\n")

    def step(self, number: int, **facts) -> None:
        self.write(at=float(number), step=number, **{"applied": True, "loss": 1 / number, "samples": 4, **facts})

    def told(self, since: int = 0) -> dict:
        """What the page is told of it, after all was read."""
        self.watcher.read_all()
        [run] = self.watcher.since(since)["runs"]
        return run

    def state(self, now: float) -> tuple[str, str]:
        self.watcher.read_all()
        return self.watcher.runs[0].state(BEGIN.timestamp() + now)


@pytest.fixture
def written(tmp_path):
    return Written(tmp_path)
