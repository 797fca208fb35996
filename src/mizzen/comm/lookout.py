"""The thread that tells the other ranks where this one is, and reads where they are while this one waits for long.

Only this thread speaks to the store: one whose host is stopped answers nothing for ever, and no rank may hang in it.
"""

import atexit
import os
import sys
import threading
import time
from dataclasses import replace
from typing import Final

from mizzen.comm.account import Account, is_gone
from mizzen.comm.backend import Store
from mizzen.comm.outside import outside_call
from mizzen.comm.whereabouts import Sighting, Wait, Whereabouts
from mizzen.log import get_logger

RECORDS_PER_SECOND: Final = 32
"""How many records of others a waiting rank reads per second: more would drown the store of a large job."""
STARTED: Final = time.time()
"""A record from before this process is of an earlier attempt of the job, where the store has outlived it."""
BEATS_PER_SECOND: Final = 256
"""How many records all ranks of a job together publish per second at most."""

PARTS: Final = 20
"""Of the time that the last word of this rank may take."""


class Lookout:
    """The thread of one rank, from the day it joins to the end of the process."""

    def __init__(self, account: Account, store: Store, *, size: int, beat: float) -> None:
        self.beat = beat
        """Seconds between two publications."""
        self.sightings: dict[int, Sighting] = {}
        """What was last seen of the peers that were looked for."""
        self.answers = 0
        """Grows whenever the store has answered."""
        self._account = account
        self._store = store
        self._size = size
        self._beats = 0
        self._next_look = 0.0
        self._main: Wait | None = None
        """What the main thread waited in at the last look."""
        self._wake = threading.Event()
        self._stale: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, name="mizzen-lookout", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit, os.getpid())

    def hurry(self) -> None:
        """Publish, and look where needed, now."""
        self._wake.set()

    def stop(self, reason: str) -> None:
        """Tell the others that this rank takes no further part, and nothing more."""
        atexit.unregister(self._at_exit)
        self._account.left = reason
        self._wake.set()
        # In parts: a machine that was paused must not use up all of the time at once. A thread that comes back from the
        # store while the interpreter ends would be ended inside C++, and the process with it.
        for _ in range(PARTS):
            self._thread.join(2 * self.beat / PARTS)

    @property
    def has_lost_the_store(self) -> bool:
        """Whether the host of the store is gone, and with it all news."""
        return not self._thread.is_alive()

    def _at_exit(self, pid: int) -> None:
        if os.getpid() == pid:  # a forked child has inherited this handler, but not the rank
            self.stop(_why_this_process_ends())

    def _run(self) -> None:
        try:
            while self._publish():
                if self._account.waits and time.monotonic() >= self._next_look:
                    self._look()
                self.answers += 1
                self._wake.wait(self._period)
                self._wake.clear()
        except RuntimeError as error:
            get_logger().debug("rank %d can no longer tell the others where it is: %s", self._account.rank, error)

    @property
    def _period(self) -> float:
        return max(self.beat, self._size / BEATS_PER_SECOND)

    def _publish(self) -> bool:
        """Tell the others; false when there is nothing more to tell."""
        self._beats += 1
        whereabouts = replace(self._account.whereabouts(self._beats), outside=outside_call())
        self._store.set(_key(whereabouts.rank), whereabouts.pack())
        return not whereabouts.left

    def _look(self) -> None:
        """Read where the peers of all present waits are."""
        waits = list(self._account.waits.values())
        peers = {peer for wait in waits for peer in wait.peers}
        main = next((wait for wait in waits if wait.on_main_thread), None)
        interval = max(self._period, len(peers) / RECORDS_PER_SECOND)
        for rank in sorted(peers):
            # `get` would wait for a key that is not there yet.
            if not self._store.check([_key(rank)]):
                continue
            seen = Whereabouts.unpack(self._store.get(_key(rank)))
            if seen.written < STARTED and self._stale.setdefault(rank, seen.beat) == seen.beat:
                continue  # unless it changes: then only the clocks of the two hosts differ
            before = self.sightings.get(rank)
            # Silence is counted in looks, not by the clock: who was suspended itself must not accuse the others.
            silent = before is not None and before.whereabouts.beat == seen.beat
            silence = before.silence + interval if before is not None and silent else 0.0
            lasts = seen.outside is not None and main is not None and main is self._main
            is_same = before is not None and lasts and before.whereabouts.outside == seen.outside
            lasting = before.lasting + (not silent) if before is not None and is_same else int(lasts)
            self.sightings[rank] = Sighting(seen, silence, gone=is_gone(seen.process), lasting=lasting)
        self._main, self._next_look = main, time.monotonic() + interval


def _key(rank: int) -> str:
    return f"whereabouts/{rank}"


def _why_this_process_ends() -> str:
    error = vars(sys).get("last_value")
    if error is None:
        return "its process ended"
    said = str(error).partition("\n")[0][:400]
    return f"its process ended with {type(error).__name__}: {said}"
