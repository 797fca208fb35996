"""Waiting that ends: every wait is sliced, and a rank whose peer has left or gone elsewhere raises a CommError.

A collective that is done within a moment pays for an entry in the account and nothing else. What is known of the other
ranks comes from `lookout.py`; what follows from it is decided in `whereabouts.py`.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mizzen.comm.account import Account, Call
from mizzen.comm.backend import Group, Handle, Request, Store
from mizzen.comm.lookout import Lookout
from mizzen.comm.tags import Tag
from mizzen.comm.whereabouts import Case, Sighting, Wait, states, verdict
from mizzen.errors import CommError
from mizzen.hang import find_hang
from mizzen.progress import get_progress

SLICE: Final = 0.25
"""Seconds between two looks at what is known, of a rank that waits for long; less than that is no wait at all."""
LOST: Final = re.compile("(?i)connection|closed|reset by peer|broken pipe|timed out|socket")
"""Words in torch's errors that mean that a peer is no longer there, as opposed to a wrong argument."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long this rank waits for others, in seconds."""

    timeout: float = 600.0
    """The longest that a collective may take."""
    look: float = 2.0
    """A wait of this length makes the rank look where its peers are."""
    silence: float = 30.0
    """A peer that has published nothing for so long, while others wait for it, is taken for dead.

    Not shorter by default: a peer that holds the interpreter's lock for long (a large unpickling) is silent as well.
    A peer that was killed on this host, or that ended, is found at the first look.
    """
    beat: float = 1.0
    """The time between two publications."""


class Watch:
    """Every wait of this rank goes through here."""

    def __init__(self, rank: int, size: int, store: Store | None, patience: Patience) -> None:
        self._patience = patience
        self._account = Account(rank)
        self._lookout = Lookout(self._account, store, size=size, beat=patience.beat) if store is not None else None

    @property
    def patience(self) -> Patience:
        """How long this rank waits."""
        return self._patience

    @patience.setter
    def patience(self, patience: Patience) -> None:
        self._patience = patience
        if self._lookout is not None:
            self._lookout.beat = patience.beat
            self._lookout.hurry()

    def begin(self, request: Request, group: Group, title: str = "", tag: Tag | None = None) -> Call:
        """Account for an operation that is about to be issued."""
        return self._account.begin(request, group, title, tag)

    def wait(self, call: Call, handle: Handle, timeout: float | None = None) -> None:
        """Return when the operation is done; raise a CommError when it has failed or cannot be done any more."""
        self.wait_for_part(call, handle, timeout)
        call.finish()

    def wait_for_part(self, call: Call, handle: Handle, timeout: float | None = None) -> None:
        """Wait for something that comes before the end of the operation, such as the comparison of sizes."""
        limit = timeout or call.group.timeout or self._patience.timeout
        try:
            if not handle.poll(SLICE if limit > SLICE else limit):
                with get_progress().waiting():
                    self._wait_long(call, handle, limit)
        except CommError:
            raise
        except RuntimeError as error:
            raise self.explain(call, error) from error

    def _wait_long(self, call: Call, handle: Handle, limit: float) -> None:
        started = time.monotonic() - SLICE
        if handle.poll(min(self._patience.look, limit)):
            return
        answers, unanswered = -1, 0.0
        with self._account.waiting(call) as wait:
            self._hurry()
            while not handle.poll(SLICE):
                if self._lookout is not None:
                    # A sum of slices, not a difference of clocks: who was suspended itself must not accuse the others.
                    unanswered = unanswered + SLICE if answers == self._lookout.answers else 0.0
                    answers = self._lookout.answers
                waited = time.monotonic() - started
                if reason := self._reason_to_stop(wait, waited, limit, unanswered):
                    handle.abandon()
                    raise self._failure(call, f"waited {waited:.1f} s in {wait.title} ({wait.place})", reason)

    def _reason_to_stop(self, wait: Wait, waited: float, limit: float, unanswered: float) -> str | None:
        if reason := self._verdict(wait, self._patience.silence):
            return reason
        if unanswered > self._patience.silence:
            return (
                f"the job's store has not answered for {unanswered:.0f} s: the process that hosts it (rank 0, unless a "
                "launcher does) has left or is stopped"
            )
        # Under a launcher its supervisor asks the same question, with the limit of the configuration.
        own, peers = states(self._account.whereabouts(), wait, waited, self._sightings)
        hang = find_hang([own, *peers], limit, first_step=-1)
        if hang is None:
            return None
        who = f"{len(hang.missing)} of {len(peers)} peers have not come: {hang.peers_in_words}"
        return f"the limit is {limit:g} s; {who if hang.missing else 'all peers have come, or are not heard of'}"

    def _verdict(self, wait: Wait, silence: float) -> str | None:
        return verdict(Case(self._account.whereabouts(), wait, silence), self._sightings)

    @property
    def _sightings(self) -> Mapping[int, Sighting]:
        return self._lookout.sightings if self._lookout is not None else {}

    def refuse(self, call: Call, error: Exception) -> CommError | None:
        """Account for an operation that could not even be issued; an error of ours when a lost peer is the cause."""
        if isinstance(error, RuntimeError) and LOST.search(str(error)):
            return self.explain(call, error)
        call.fail(f"{type(error).__name__}: {first_sentence(error)}")
        self._hurry()
        return None

    def explain(self, call: Call, error: RuntimeError) -> CommError:
        """What went wrong below, in our words, with the rank that caused it if it can be found out."""
        reason = said = first_sentence(error)
        if LOST.search(said):
            reason = f"{self._find_culprit(call) or 'it is not known which rank has left'}. The backend says: {said}"
        waited = time.monotonic() - call.entered
        return self._failure(call, f"failed after {waited:.1f} s in {call.title} ({call.place})", reason)

    def _find_culprit(self, call: Call) -> str | None:
        """Look for a peer that has left: its word may come a little after its connection is lost."""
        if self._lookout is None:
            return None
        with self._account.waiting(call) as wait:
            for _ in range(round(2 * self._patience.look / SLICE)):
                self._hurry()
                time.sleep(SLICE)
                if found := self._verdict(wait, 2 * self._patience.beat):
                    return found
                if self._lookout.has_lost_the_store:
                    return "the job's store is gone too, so most likely the process that hosts it has left: rank 0"
        return None

    def _failure(self, call: Call, what: str, reason: str) -> CommError:
        message = f"rank {self._account.rank} {what}: {reason}"
        call.fail(message)
        self._hurry()
        return CommError(message)

    def _hurry(self) -> None:
        if self._lookout is not None:
            self._lookout.hurry()

    def leave(self, reason: str) -> None:
        """Tell the others that this rank takes no further part."""
        if self._lookout is not None:
            self._lookout.stop(reason)


def first_sentence(error: BaseException) -> str:
    """What an error says, without the place in the C++ sources that it begins with and the advice that it ends with."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^\]]*\.(cc|cpp|hpp|h):\d+\]\s*", "", line).partition(". ")[0]
