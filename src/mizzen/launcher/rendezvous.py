"""What the supervisors of a job know together: who is there, who takes part in which attempt, how that goes. Pure.

The first node keeps it, and all nodes ask it through `channel.py`. Time and connections are told to it.

[Note: rounds]
Nodes that want to take part wait. When enough of them wait, a round begins: one attempt to run the job. Who comes later
waits for the next one, and the nodes of the round are told of it. The next round begins when every node of this one
wants it, is lost, or has left; the numbers of rounds are those of the attempts.

[Note: who is gone]
A node whose connection ends without a word is lost at once: its supervisor was killed. One that is silent for long is
lost, too: its machine or its network is gone. Until then it is in doubt, and no failure that might be its doing is held
against anybody. While a node is gone, a failure in the same round counts for nothing: ranks fall when others vanish.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from mizzen.launcher.failure import Failure
from mizzen.launcher.place import Member
from mizzen.launcher.pulse import LOST, Pulse

FIRST: Final = 0
"""The node that keeps all this."""
LAST_CALL: Final = 3.0
"""Seconds for which an elastic job that could start for the first time waits for more nodes."""
STRAGGLERS: Final = 30.0
"""Seconds for which nodes that want another attempt wait for one that is there and does not."""
UNHEARD: Final = 15.0
"""Seconds after which a node that waits and no longer asks is forgotten."""


@dataclass(frozen=True, slots=True)
class News:
    """What a node learns of the others."""

    failure: Failure | None = None
    """The one that counts for this attempt."""
    request: str = ""
    """What some node has asked all for."""
    has_changed: bool = False
    """Whether nodes wait to join."""
    is_over: bool = False
    """Whether other nodes of this attempt want another one already."""
    are_finished: bool = False
    """Whether the ranks of all nodes are done."""
    gone: str = ""
    """Who has left before its ranks were done, or is lost, in words."""
    are_enough: bool = False
    """Whether those that remain may go on without them."""
    is_in_doubt: bool = False
    """Whether a node has been silent for a while, so that it may be gone."""

    @classmethod
    def unpack(cls, given: dict[str, Any]) -> "News":
        """From what `asdict` gives."""
        failure = given.pop("failure")
        return cls(failure=None if failure is None else Failure(**failure), **given)


@dataclass(slots=True)
class Round:
    """One attempt: its nodes, in the order of their indices, and what they have said."""

    attempt: int
    members: tuple[Member, ...]
    pulse: Pulse
    beats: dict[int, int]
    finished: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    """Nodes that take no further part."""
    gone: dict[int, str] = field(default_factory=dict)
    """Nodes that are gone before their ranks were done, and how."""
    failure: Failure | None = None
    request: str = ""
    master: tuple[str, int] | None = None
    """Where the ranks meet."""
    shared: dict[str, dict[int, str]] = field(default_factory=dict)

    @property
    def present(self) -> list[int]:
        """The nodes that are still there."""
        return [index for index in self.indices if index not in self.left]

    @property
    def indices(self) -> list[int]:
        """All nodes of this attempt."""
        return [member.index for member in self.members]

    @property
    def is_in_doubt(self) -> bool:
        """Whether a node whose ranks are not done has been silent for a while."""
        doubtful = {self.indices[position] for position in self.pulse.doubtful}
        return bool(doubtful.intersection(self.present) - self.finished)

    def lose(self, index: int, how: str) -> None:
        """A node takes no further part; where its ranks were not done, it is gone."""
        if index not in self.finished:
            member = next(member for member in self.members if member.index == index)
            self.gone[index] = f"node {index} ({member.host}) {how}"
        self.left.add(index)


@dataclass(slots=True)
class Waiting:
    """A node that wants to take part."""

    member: Member
    asked: float


class Rendezvous:
    """The state, and everything that a node may ask: the methods in `QUESTIONS`, each with the node's index first."""

    def __init__(self, min_nodes: int, max_nodes: int) -> None:
        self._min_nodes, self._max_nodes = min_nodes, max_nodes
        self._waiting: dict[int, Waiting] = {}
        self._round: Round | None = None
        self._failures = 0
        self._enough_since: float | None = None
        self._over_since: float | None = None
        self._closed: tuple[str, bool] | None = None
        self.now = 0.0

    # What nodes ask

    def want(self, index: int, member: dict[str, Any]) -> None:
        """Wait for the next round."""
        self._waiting[index] = Waiting(Member(**member), self.now)
        self._begin_round()

    def place(self, index: int, after: int) -> dict[str, Any]:
        """The round that began after attempt `after` and has this node; until then, how many wait and who is gone.

        Where the first node has left, so that there will be no more rounds: its words, and whether it was asked to.
        """
        if self._closed is not None:
            return {"closed": self._closed}
        waiting = self._waiting.get(index)
        if waiting is not None:
            waiting.asked = self.now
        self._begin_round()
        current = self._round
        if current is not None and current.attempt > after and index in current.present:
            members = [asdict(member) for member in current.members]
            return {"attempt": current.attempt, "members": members, "master": current.master}
        return {"waiting": len(self._waiting), "gone": self._gone_in_words(), "are_enough": self._are_enough()}

    def open_store(self, index: int, address: str, port: int) -> None:
        """Say where the ranks of this attempt meet."""
        self._of(index).master = (address, port)

    def look(self, index: int) -> dict[str, Any]:
        """What is known now. It is also the sign of life of the node that asks."""
        if self._round is None or index not in self._round.indices:
            return asdict(News(is_over=True))  # the others have not waited for it
        current = self._round
        current.beats[index] += 1
        newcomers = [other for other in self._waiting if other not in current.present]
        return asdict(
            News(
                failure=current.failure,
                request=current.request,
                has_changed=bool(newcomers) and len(current.present) < self._max_nodes,
                is_over=any(other in self._waiting for other in current.present),
                are_finished=len(current.finished) == len(current.members),
                gone=self._gone_in_words(),
                are_enough=self._are_enough(),
                is_in_doubt=current.is_in_doubt,
            )
        )

    def fail(self, index: int, failure: dict[str, Any]) -> dict[str, Any] | None:
        """Tell of a failure; the one that counts comes back. None where nodes are gone, and none counts."""
        current = self._of(index)
        if current.failure is None and not current.gone:
            self._failures += 1
            current.failure = Failure(**{**failure, "number": self._failures})
        return None if current.failure is None else asdict(current.failure)

    def finish(self, index: int) -> None:
        """Say that the ranks of this node are done."""
        self._of(index).finished.add(index)

    def request(self, index: int, word: str) -> None:
        """Ask all nodes for something."""
        self._of(index).request = word

    def share(self, index: int, key: str, text: str) -> None:
        """Say something under a key."""
        self._of(index).shared.setdefault(key, {})[index] = text

    def shared(self, index: int, key: str) -> tuple[bool, list[str]]:
        """What nodes have said under a key, in their order, and whether that is all of them."""
        current = self._of(index)
        said = current.shared.get(key, {})
        return all(other in said for other in current.present), [said[other] for other in sorted(said)]

    def leave(self, index: int, words: str, was_asked: bool) -> None:
        """Take no further part."""
        self._waiting.pop(index, None)
        if index == FIRST:
            self._closed = (words, was_asked)
        if self._round is not None and index in self._round.present:
            self._round.lose(index, "has left" + (f": {words}" if words else ""))
        self._begin_round()

    def others(self, index: int) -> list[int]:
        """Which other nodes have yet to leave."""
        present = self._round.present if self._round is not None else []
        return [other for other in (*present, *self._waiting) if other != index]

    # What the host of the meeting says

    def hang_up(self, index: int) -> None:
        """The connection of a node has ended."""
        self._waiting.pop(index, None)
        if self._round is not None and index in self._round.present:
            self._round.lose(index, "is lost: its supervisor has ended without a word")
        self._begin_round()

    def tick(self, now: float) -> None:
        """Time passes: silent nodes are lost, and rounds begin."""
        self.now = now
        for index in [index for index, one in self._waiting.items() if now - one.asked > UNHEARD]:
            del self._waiting[index]
        if (current := self._round) is not None:
            beats = [current.beats[index] for index in current.indices]
            for position in current.pulse.silent(beats, now):
                index = current.indices[position]
                if index in current.present and index not in self._waiting:
                    current.lose(index, f"is lost: its supervisor has not been heard of for {LOST:.0f} s")
        self._begin_round()

    def is_taken(self, index: int) -> bool:
        """Whether a node of that index is there already."""
        return index in self._waiting or (self._round is not None and index in self._round.present)

    def _of(self, index: int) -> Round:
        if self._round is None or index not in self._round.indices:
            raise LookupError(f"node {index} takes part in no attempt")
        return self._round

    def _gone_in_words(self) -> str:
        return "; ".join(self._round.gone.values()) if self._round is not None else ""

    def _are_enough(self) -> bool:
        present = self._round.present if self._round is not None else []
        return len({*present, *self._waiting}) >= self._min_nodes

    def _begin_round(self) -> None:
        chosen = self._chosen()
        if not chosen:
            return
        members = tuple(self._waiting.pop(index).member for index in sorted(chosen))
        attempt = self._round.attempt + 1 if self._round is not None else 0
        beats = {member.index: 0 for member in members}
        self._round = Round(attempt, members, Pulse(len(members), self.now), beats)
        self._enough_since = self._over_since = None

    def _chosen(self) -> Sequence[int]:
        """Who takes part in a round that begins now; nobody where none does."""
        if self._closed is not None:
            return ()
        present = self._round.present if self._round is not None else []
        staying = [index for index in present if index in self._waiting]
        wanted = sorted(self._waiting, key=lambda index: (index not in staying, index))[: self._max_nodes]
        if len(wanted) < self._min_nodes:
            self._enough_since = None
            return ()
        if len(wanted) == self._max_nodes and len(staying) == len(present):
            return wanted
        if self._round is None:
            self._enough_since = self._enough_since if self._enough_since is not None else self.now
            return wanted if self.now - self._enough_since >= LAST_CALL else ()
        if not staying and present:
            return ()  # newcomers, and a round that goes on
        self._over_since = self._over_since if self._over_since is not None else self.now
        is_long = self.now - self._over_since >= STRAGGLERS
        return wanted if len(staying) == len(present) or is_long else ()


QUESTIONS: Final = (
    *(Rendezvous.want, Rendezvous.place, Rendezvous.open_store, Rendezvous.look, Rendezvous.fail, Rendezvous.finish),
    *(Rendezvous.request, Rendezvous.share, Rendezvous.shared, Rendezvous.leave, Rendezvous.others),
)
