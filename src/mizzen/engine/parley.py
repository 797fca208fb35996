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
# that it has done since changes what is saved. Either way all of them end up here, and then say so; if one does not
# come, because it has left the evaluation and waits for the others in a step, rank 0 calls the stop off.
AHEAD: Final = 8
"""How many calls lie between the word and the stop: more than a loop fetches or runs ahead of the other ranks."""
PATIENCE: Final = 10.0
"""Seconds that rank 0 waits for the others at the call that it has named."""
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
        self._is_over = True
        self._store.set(self._key("here", self._rank), b"1")
        return self._decide(self._store) if self._rank == 0 else self._hear(self._store)

    def _decide(self, store: "Store") -> bool:
        until = time.monotonic() + PATIENCE
        while not (is_here := store.check(self._of_all("here"))) and time.monotonic() < until:
            time.sleep(PAUSE)
        store.set(self._key("verdict"), b"stop" if is_here else b"go on")
        return is_here

    def _hear(self, store: "Store") -> bool:
        while not store.check([self._key("verdict")]):  # rank 0 always answers, and its end ends this rank too
            time.sleep(PAUSE)
        return store.get(self._key("verdict")) == b"stop"

    def _key(self, word: str, rank: int | None = None) -> str:
        return f"{self._place}/{word}" + ("" if rank is None else f"/{rank}")

    def _of_all(self, word: str) -> list[str]:
        return [self._key(word, rank) for rank in range(self._size)]
