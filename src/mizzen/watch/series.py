"""Any number of points in bounded memory: neighbours share a bucket, which keeps its lowest, highest and last value."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MOST: Final = 1024
"""Buckets of a series: about as many as a chart has pixels. Even, so that pairs of full buckets can be joined."""
TIME, STEP, LOW, HIGH, LAST = range(5)


class Series:
    """Points of one number, in the order in which they were written.

    While there are few, each has a bucket of its own. When all buckets are full they are joined in pairs, and from then
    on a bucket takes twice as many points. So a spike is never lost, only the moment of it gets less exact.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._buckets: NDArray[np.float64] = np.empty((5, 0))
        self._revisions: NDArray[np.int64] = np.empty(0, np.int64)
        self._used = 0
        self._room = 0
        self.width = 1
        """Points of a full bucket."""

    def extend(self, points: Sequence[tuple[float, float, float]], revision: int) -> None:
        """Add (time, step, value)s; `revision` is the number under which a reader will ask for what has changed."""
        new = np.asarray(points, np.float64).T
        new[2][~np.isfinite(new[2])] = np.nan  # charts have no infinity
        while new.shape[1]:
            if not self._room and self._used == self._most:
                self._join(revision)
            taken = self._room or min(new.shape[1], (self._most - self._used) * self.width)
            head, new = new[:, :taken], new[:, taken:]
            self._put(head, revision)

    def since(self, revision: int) -> dict[str, Any]:
        """What has changed after a revision: the place of the first such bucket, and all from there on as columns."""
        start = int(np.searchsorted(self._revisions[: self._used], revision, side="right"))
        time, step, low, high, last = (_numbers(row) for row in self._buckets[:, start : self._used])
        columns = {"from": start, "time": time, "step": step, "last": last}
        return columns if self.width == 1 else {**columns, "low": low, "high": high}

    def step_at(self, time: float) -> float:
        """The step of the last bucket that ends before a moment; 0 where there is none."""
        before = int(np.searchsorted(self._buckets[TIME, : self._used], time))
        return float(self._buckets[STEP, before - 1]) if before else 0.0

    @property
    def last(self) -> list[float]:
        """The last value of each bucket, for a small drawing."""
        return self._buckets[LAST, : self._used].tolist()  # type: ignore[no-any-return]

    def _put(self, points: NDArray[np.float64], revision: int) -> None:
        """Into the open bucket if there is one (and then it fits), else into as many new ones as it takes."""
        time, step, value = points
        if self._room:
            place, self._room = self._used - 1, self._room - len(value)
            low, high = np.fmin.reduce(value), np.fmax.reduce(value)
            bucket = self._buckets[:, place]
            bucket[[TIME, STEP, LAST]] = time[-1], step[-1], value[-1]
            bucket[LOW], bucket[HIGH] = np.fmin(bucket[LOW], low), np.fmax(bucket[HIGH], high)
            self._revisions[place] = revision
            return
        starts = np.arange(0, len(value), self.width)
        ends = np.append(starts[1:], len(value)) - 1
        low, high = np.fmin.reduceat(value, starts), np.fmax.reduceat(value, starts)
        place, self._used = self._used, self._used + len(starts)
        self._grow()
        self._buckets[:, place : self._used] = time[ends], step[ends], low, high, value[ends]
        self._revisions[place : self._used] = revision
        self._room = len(starts) * self.width - len(value)

    def _grow(self) -> None:
        """Most series are short; only long ones take the memory of long ones."""
        if self._used > len(self._revisions):
            more = min(self._most, max(64, 2 * self._used)) - len(self._revisions)
            self._buckets = np.pad(self._buckets, ((0, 0), (0, more)))
            self._revisions = np.pad(self._revisions, (0, more))

    def _join(self, revision: int) -> None:
        """Two full buckets become one."""
        first, second = self._buckets[:, 0::2], self._buckets[:, 1::2]
        joined = second.copy()
        joined[LOW], joined[HIGH] = np.fmin(first[LOW], second[LOW]), np.fmax(first[HIGH], second[HIGH])
        self._used //= 2
        self._buckets[:, : self._used] = joined
        self._revisions[: self._used] = revision
        self.width *= 2


def _numbers(row: NDArray[np.float64]) -> list[float | None]:
    return [None if value != value else value for value in row.tolist()]
