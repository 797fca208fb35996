"""Where the ranks of an evaluation stop: agreed through the store of the job, because there is no step to agree in.

A collective would not do. Ranks may evaluate unequal numbers of batches, or only one of them evaluates, and a rank that
enters a collective that another never comes to is worse off than one that goes on for a while.
"""

import time
from typing import TYPE_CHECKING, Final

from mizzen.environment import environ, integer

if TYPE_CHECKING:
    from mizzen.comm.backend import Store

# [Note: stopping ahead]
# Rank 0 names a call that lies a few ahead of its own, before it takes part in anything further. Where the calls hold
# collectives, no rank is more than a few calls away from rank 0, so all of them see the word before they come to that
# call, and all stop at exactly it. Where the calls hold none, a rank may be past it, and stops where it is: nothing
# that it has done since changes what is saved. Either way all of them end up here, and then say so. A rank that leaves
# the evaluation instead, and would wait for the others in a step, calls the stop off; so does one that has waited for
# too long. Who is the first to give a verdict has given it for all.
AHEAD: Final = 8
"""How many calls lie between the word and the stop: more than a loop fetches or runs ahead of the other ranks."""
PATIENCE: Final = 10.0
"""Seconds that rank 0 waits for the others at the call that it has named."""
LONGEST: Final = 60.0
"""Seconds that the others wait for rank 0, which may have some calls to go."""
PAUSE: Final = 0.02


class Parley:
    """What the ranks have told each other about one request, after one step."""

    def __init__(self, store: "Store | None", rank: int, size: int, step: int) -> None:
        self.step = step
        self._store = store
        self._rank = rank
        self._size = size
        self._place = f"parley/{integer(environ(), 'TORCHELASTIC_RESTART_COUNT', 0)}/{step}"
        self._has_asked = self._is_named = self._is_over = False

    def is_agreed(self, call: int) -> bool:
        """Whether all ranks stop now. Every rank asks at each of its calls, once it knows of the request."""
        if self._store is None or self._is_over:
            return self._store is None
        if not self._has_asked:
            self._has_asked = True
            self._store.set(self._key("asked", self._rank), b"1")
        if self._rank == 0 and not self._is_named and self._store.check(self._of_all("asked")):
            self._is_named = True
            self._store.set(self._key("stop"), str(call + AHEAD).encode())
        if not self._store.check([self._key("stop")]) or call < int(self._store.get(self._key("stop"))):
            return False
        self._store.set(self._key("here", self._rank), b"1")
        until = time.monotonic() + (PATIENCE if self._rank == 0 else LONGEST)
        is_time = False
        while not (is_time or self._store.check([self._key("verdict")]) or time.monotonic() > until):
            time.sleep(PAUSE)
            is_time = self._rank == 0 and self._store.check(self._of_all("here"))
        return self._settle(self._store, is_time)

    def call_off(self) -> None:
        """This rank has left the evaluation: nobody is to wait for it."""
        if self._store is not None and self._has_asked and not self._is_over:
            self._settle(self._store, False)

    def _settle(self, store: "Store", is_time: bool) -> bool:
        self._is_over = True
        return store.compare_set(self._key("verdict"), b"", b"stop" if is_time else b"go on") == b"stop"

    def _key(self, word: str, rank: int | None = None) -> str:
        return f"{self._place}/{word}" + ("" if rank is None else f"/{rank}")

    def _of_all(self, word: str) -> list[str]:
        return [self._key(word, rank) for rank in range(self._size)]
