"""What the supervisors of a job know together: who is there, who takes part in which attempt. Pure.

The first node keeps this state, and all nodes ask it through `channel.py`. Time and connections are told to it.

[Note: attempts]
Nodes that want to take part wait. When enough of them wait, an attempt to run the job begins. A node that comes later
waits for the next attempt, and the nodes of the present one are told of it. The next attempt begins when every node of
this one wants it, is lost, or has left.

[Note: who is gone]
A node whose connection ends without a word is lost at once: its supervisor was killed. One that is silent for long is
lost, too: its machine or its network is gone. Until then it is in doubt, and no failure that might be its doing is held
against anybody. While a node is gone, a failure in the same attempt counts for nothing: ranks fall when others vanish.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from mizzen.launcher.outcome import Failure

FIRST: Final = 0
"""The node that keeps all this."""
LAST_CALL: Final = 3.0
"""Seconds for which an elastic job that could start for the first time waits for more nodes."""
STRAGGLERS: Final = 30.0
"""Seconds for which nodes that want another attempt wait for one that is there and does not."""
UNHEARD: Final = 15.0
"""Seconds after which a node that waits and no longer asks is forgotten."""
LOST: Final = 15.0
"""Seconds of silence after which a node is lost."""
DOUBTFUL: Final = 1.5
"""Seconds of silence after which a node is in doubt."""
STARTING: Final = 120.0
"""Seconds of silence after which a node is lost that was never heard of: it may still be starting its ranks."""
LONGEST_LOOK: Final = 1.0
"""What one look adds to a silence at most: who was held up himself must not take it for the silence of others."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one node is given in one attempt: its number, its ranks, and where all ranks meet."""

    node: int
    nodes: int
    first_rank: int
    world: int
    master_addr: str
    master_port: int
    attempt: int = 0
    """How many attempts the job has made before: one number for all nodes, also for one that has just come."""
    interface: str | None = None
    """The network interface that leads to the other nodes."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node says of itself when it joins."""

    index: int
    slots: int
    host: str
    address: str


def assign_ranks(nodes: Sequence[NodeInfo], index: int) -> tuple[int, int, int]:
    """Number, first rank and world of a node: nodes are in the order of their indices, ranks follow one another."""
    order = sorted(nodes, key=lambda node: node.index)
    number = next(number for number, node in enumerate(order) if node.index == index)
    return number, sum(node.slots for node in order[:number]), sum(node.slots for node in order)


class Heartbeats:
    """The beats of the nodes of one attempt, each a count that grows for as long as the node lives."""

    def __init__(self, nodes: int, now: float) -> None:
        self._beats = [0] * nodes
        self._silence = [0.0] * nodes
        self._looked = now

    def silent(self, beats: Sequence[int], now: float) -> list[int]:
        """Take in what was counted now; the nodes that have been silent for too long."""
        passed, self._looked = min(now - self._looked, LONGEST_LOOK), now
        for node, (before, count) in enumerate(zip(self._beats, beats, strict=True)):
            self._silence[node] = 0.0 if count > before else self._silence[node] + passed
        self._beats = list(beats)
        return [node for node in range(len(beats)) if self._silence[node] > self.patience(node)]

    def patience(self, node: int) -> float:
        """Seconds of silence after which this node is lost."""
        return LOST if self._beats[node] else STARTING

    @property
    def doubtful(self) -> list[int]:
        """The nodes that were heard of and may be lost."""
        return [node for node, count in enumerate(self._beats) if count and self._silence[node] > DOUBTFUL]


@dataclass(frozen=True, slots=True)
class RendezvousStatus:
    """What a node learns of the others when it asks for the status."""

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
    def unpack(cls, given: dict[str, Any]) -> "RendezvousStatus":
        """The status that the first node has sent as a dict."""
        failure = given.pop("failure")
        return cls(failure=None if failure is None else Failure(**failure), **given)


@dataclass(slots=True)
class Attempt:
    """One attempt to run the job: its nodes, in the order of their indices, and what they have said."""

    number: int
    nodes: tuple[NodeInfo, ...]
    heartbeats: Heartbeats
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
        return [node.index for node in self.nodes]

    @property
    def is_in_doubt(self) -> bool:
        """Whether a node whose ranks are not done has been silent for a while."""
        doubtful = {self.indices[position] for position in self.heartbeats.doubtful}
        return bool(doubtful.intersection(self.present) - self.finished)

    def lose(self, index: int, how: str) -> None:
        """A node takes no further part; where its ranks were not done, it is gone."""
        if index not in self.finished:
            node = next(node for node in self.nodes if node.index == index)
            self.gone[index] = f"node {index} ({node.host}) {how}"
        self.left.add(index)


@dataclass(slots=True)
class WaitingNode:
    """A node that wants to take part."""

    info: NodeInfo
    asked: float


class RendezvousState:
    """What the first node keeps. Nodes may ask the methods in `QUESTIONS`, each with the index of the node first."""

    def __init__(self, min_nodes: int, max_nodes: int) -> None:
        self._min_nodes, self._max_nodes = min_nodes, max_nodes
        self._waiting: dict[int, WaitingNode] = {}
        self._attempt: Attempt | None = None
        self._failures = 0
        self._enough_since: float | None = None
        self._over_since: float | None = None
        self._closed: tuple[str, bool] | None = None
        self.now = 0.0

    # What nodes ask

    def join(self, index: int, node: dict[str, Any]) -> None:
        """Wait for the next attempt."""
        self._waiting[index] = WaitingNode(NodeInfo(**node), self.now)
        self._begin_attempt()

    def assignment(self, index: int, after: int) -> dict[str, Any]:
        """The attempt after number `after` that has this node; until it begins, how many wait and who is gone.

        Where the first node has left, so that there will be no more attempts: its words, and whether it was asked to.
        """
        if self._closed is not None:
            return {"closed": self._closed}
        waiting = self._waiting.get(index)
        if waiting is not None:
            waiting.asked = self.now
        self._begin_attempt()
        current = self._attempt
        if current is not None and current.number > after and index in current.present:
            nodes = [asdict(node) for node in current.nodes]
            return {"attempt": current.number, "nodes": nodes, "master": current.master}
        return {"waiting": len(self._waiting), "gone": self._gone_in_words(), "are_enough": self._are_enough()}

    def open_store(self, index: int, address: str, port: int) -> None:
        """Say where the ranks of this attempt meet."""
        self._attempt_of(index).master = (address, port)

    def status(self, index: int) -> dict[str, Any]:
        """What is known now. It is also the sign of life of the node that asks."""
        if self._attempt is None or index not in self._attempt.indices:
            return asdict(RendezvousStatus(is_over=True))  # the others have not waited for it
        current = self._attempt
        current.beats[index] += 1
        newcomers = [other for other in self._waiting if other not in current.present]
        return asdict(
            RendezvousStatus(
                failure=current.failure,
                request=current.request,
                has_changed=bool(newcomers) and len(current.present) < self._max_nodes,
                is_over=any(other in self._waiting for other in current.present),
                are_finished=len(current.finished) == len(current.nodes),
                gone=self._gone_in_words(),
                are_enough=self._are_enough(),
                is_in_doubt=current.is_in_doubt,
            )
        )

    def report_failure(self, index: int, failure: dict[str, Any]) -> dict[str, Any] | None:
        """Tell of a failure; the one that counts comes back. None where nodes are gone, and none counts."""
        current = self._attempt_of(index)
        if current.failure is None and not current.gone:
            self._failures += 1
            current.failure = Failure(**{**failure, "number": self._failures})
        return None if current.failure is None else asdict(current.failure)

    def report_done(self, index: int) -> None:
        """Say that the ranks of this node are done."""
        self._attempt_of(index).finished.add(index)

    def request(self, index: int, word: str) -> None:
        """Ask all nodes for something."""
        self._attempt_of(index).request = word

    def share(self, index: int, key: str, text: str) -> None:
        """Say something under a key."""
        self._attempt_of(index).shared.setdefault(key, {})[index] = text

    def shared(self, index: int, key: str) -> tuple[bool, list[str]]:
        """What nodes have said under a key, in their order, and whether that is all of them."""
        current = self._attempt_of(index)
        said = current.shared.get(key, {})
        return all(other in said for other in current.present), [said[other] for other in sorted(said)]

    def leave(self, index: int, words: str, was_asked: bool) -> None:
        """Take no further part."""
        self._waiting.pop(index, None)
        if index == FIRST:
            self._closed = (words, was_asked)
        if self._attempt is not None and index in self._attempt.present:
            self._attempt.lose(index, "has left" + (f": {words}" if words else ""))
        self._begin_attempt()

    def remaining(self, index: int) -> list[int]:
        """Which other nodes have yet to leave."""
        present = self._attempt.present if self._attempt is not None else []
        return [other for other in (*present, *self._waiting) if other != index]

    # What the node that keeps this state says

    def disconnect(self, index: int) -> None:
        """The connection of a node has ended."""
        self._waiting.pop(index, None)
        if self._attempt is not None and index in self._attempt.present:
            self._attempt.lose(index, "is lost: its supervisor has ended without a word")
        self._begin_attempt()

    def tick(self, now: float) -> None:
        """Time passes: silent nodes are lost, and attempts begin."""
        self.now = now
        for index in [index for index, one in self._waiting.items() if now - one.asked > UNHEARD]:
            del self._waiting[index]
        if (current := self._attempt) is not None:
            beats = [current.beats[index] for index in current.indices]
            for position in current.heartbeats.silent(beats, now):
                index = current.indices[position]
                if index in current.present and index not in self._waiting:
                    passed = current.heartbeats.patience(position)
                    current.lose(index, f"is lost: its supervisor has not been heard of for {passed:.0f} s")
        self._begin_attempt()

    def is_taken(self, index: int) -> bool:
        """Whether a node of that index is there already."""
        return index in self._waiting or (self._attempt is not None and index in self._attempt.present)

    def _attempt_of(self, index: int) -> Attempt:
        if self._attempt is None or index not in self._attempt.indices:
            raise LookupError(f"node {index} takes part in no attempt")
        return self._attempt

    def _gone_in_words(self) -> str:
        return "; ".join(self._attempt.gone.values()) if self._attempt is not None else ""

    def _are_enough(self) -> bool:
        present = self._attempt.present if self._attempt is not None else []
        return len({*present, *self._waiting}) >= self._min_nodes

    def _begin_attempt(self) -> None:
        chosen = self._chosen()
        if not chosen:
            return
        nodes = tuple(self._waiting.pop(index).info for index in sorted(chosen))
        attempt = self._attempt.number + 1 if self._attempt is not None else 0
        beats = {node.index: 0 for node in nodes}
        self._attempt = Attempt(attempt, nodes, Heartbeats(len(nodes), self.now), beats)
        self._enough_since = self._over_since = None

    def _chosen(self) -> Sequence[int]:
        """The nodes of an attempt that begins now; none where it cannot begin yet."""
        if self._closed is not None:
            return ()
        present = self._attempt.present if self._attempt is not None else []
        staying = [index for index in present if index in self._waiting]
        wanted = sorted(self._waiting, key=lambda index: (index not in staying, index))[: self._max_nodes]
        if len(wanted) < self._min_nodes:
            self._enough_since = None
            return ()
        if len(wanted) == self._max_nodes and len(staying) == len(present):
            return wanted
        if self._attempt is None:
            self._enough_since = self._enough_since if self._enough_since is not None else self.now
            return wanted if self.now - self._enough_since >= LAST_CALL else ()
        if not staying and present:
            return ()  # newcomers, and an attempt that goes on
        self._over_since = self._over_since if self._over_since is not None else self.now
        is_long = self.now - self._over_since >= STRAGGLERS
        return wanted if len(staying) == len(present) or is_long else ()


QUESTIONS: Final = (
    RendezvousState.join,
    RendezvousState.assignment,
    RendezvousState.open_store,
    RendezvousState.status,
    RendezvousState.report_failure,
    RendezvousState.report_done,
    RendezvousState.request,
    RendezvousState.share,
    RendezvousState.shared,
    RendezvousState.leave,
    RendezvousState.remaining,
)
