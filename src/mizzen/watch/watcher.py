"""Several runs, read on in a thread of their own while others ask what has changed."""

import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from mizzen.watch.run import Run

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
        """Read no more."""
        self._is_over.set()

    def _follow(self) -> None:
        while not self._is_over.is_set():
            if not self.look():
                self._is_over.wait(PAUSE)
