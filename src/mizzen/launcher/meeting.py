"""How supervisors meet: one alone, or several through the first of them.

[Note: two stores]
What supervisors tell each other goes through the first node, at the job's meeting port, for as long as the job lives
(`rendezvous.py` is what it keeps, `channel.py` how it is reached). The ranks of an attempt get a store of torch, at a
port that the system chose, hosted by the first supervisor of that attempt: so no attempt ever reads an address that a
dead one has left, and no two jobs want the same port. The port is bound before its number is told to anybody.
"""

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Protocol, TypeVar

import psutil

from mizzen.errors import LaunchError
from mizzen.launcher.channel import Channel, ChannelServer, Peer, Refused, call
from mizzen.launcher.failure import Failure
from mizzen.launcher.hosts import Host
from mizzen.launcher.job import Job
from mizzen.launcher.place import Member, Place, settle
from mizzen.launcher.pulse import LONGEST_LOOK, LOST
from mizzen.launcher.rendezvous import QUESTIONS, News, Rendezvous
from mizzen.launcher.store import LOOPBACK, StoreHost, bind
from mizzen.network import is_loopback, resolve

Result = TypeVar("Result")

JOIN: Final = 600.0
"""Seconds for which the other nodes are waited for at the start."""
POLL: Final = 0.1
"""Seconds between two questions of a node that waits for something."""
REJOIN: Final = 60.0
"""Seconds in which nodes that all want another attempt must have met."""
SILENCE: Final = 30.0
"""Seconds without an answer from the first node after which it counts as lost."""
FAREWELL: Final = 5.0
"""Seconds for which the first node waits at the end for the others to have heard of it."""


class Stopped(LaunchError):
    """The first node was asked to stop, and the job with it."""


class Meeting(Protocol):
    """How a supervisor deals with the others. It calls join, then the rest while ranks run, leave at the end."""

    def join(self) -> Place:
        """Wait until the next attempt can start."""

    def fail(self, failure: Failure) -> Failure | None:
        """Tell the others of a failure; the one that counts for this attempt comes back, with its number.

        None counts where nodes are gone: `news` says who.
        """

    def finish(self) -> None:
        """Say that the ranks of this node are done."""

    def news(self) -> News:
        """What is known now; this never waits. Raises a LaunchError when nothing was heard for long."""

    def request(self, word: str) -> None:
        """Ask all nodes for something."""

    def share(self, key: str, text: str) -> list[str]:
        """What every node has to say under this key; those that do not answer in a moment are left out."""

    def leave(self, words: str, *, was_asked: bool = False) -> None:
        """Take no further part; the others learn why, and whether this node was asked to."""


class Alone:
    """One node: nobody to wait for, nobody to tell."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._host: StoreHost | None = None
        self._attempts = self._failures = 0

    def join(self) -> Place:
        """A fresh port each time, unless the user has fixed one."""
        if self._host is not None:
            self._host.close()
        self._host = StoreHost(LOOPBACK, self._job.master_port)
        self._host.serve_soon()
        slots = len(self._job.hosts[0].slots)
        self._attempts += 1
        return Place(0, 1, 0, slots, LOOPBACK, self._host.port, attempt=self._attempts - 1)

    def fail(self, failure: Failure) -> Failure:
        """Count it."""
        self._failures += 1
        return replace(failure, number=self._failures)

    def finish(self) -> None:
        """Nobody to tell."""

    def news(self) -> News:
        """Nobody else has anything to do."""
        return News(are_finished=True)

    def request(self, word: str) -> None:
        """Nobody to ask."""

    def share(self, key: str, text: str) -> list[str]:
        """What we said ourselves."""
        return [text]

    def leave(self, words: str, *, was_asked: bool = False) -> None:
        """Free the port."""
        if self._host is not None:
            self._host.close()


@dataclass(frozen=True, slots=True)
class Seat:
    """Which node of a job this is, and what it has."""

    index: int
    host: Host
    master_addr: str


class Together:
    """Several nodes; the first of them keeps what all of them know."""

    def __init__(self, job: Job, seat: Seat, env: Mapping[str, str]) -> None:
        self._job, self._seat, self._env = job, seat, env
        self._address = address_towards(seat.master_addr)
        self._hosting: _Hosting | None = None
        self._channel: Channel | None = None
        self._attempt = -1
        self._ranks: StoreHost | None = None
        self._is_leaving = False
        # [Note: a first node that does not answer]
        # When the first node vanishes without a word, a question to it is never answered. So all of them are put by a
        # thread, and the supervisor, which must heed its ranks and its signals, waits for none of them for long.
        self._pool = ThreadPoolExecutor(1, "mizzen-asking")
        self._looking: Future[News] | None = None
        self._looked = 0.0
        self._news = News()

    def _in_thread(self, call: Callable[[], Result], patience: float) -> Result:
        """What the thread brings back."""
        try:
            return self._pool.submit(call).result(patience)
        except TimeoutError:
            raise self._lost() from None

    def _lost(self) -> LaunchError:
        return LaunchError(
            f"node {self._seat.index} has not heard from the first node at {self._seat.master_addr}:"
            f"{self._job.master_port} for {SILENCE:.0f} s: that node, or the network to it, is gone"
        )

    def _ask(self, question: str, *words: Any) -> Any:
        """Put a question to the first node. Only the thread does this."""
        if self._channel is None:
            raise AssertionError("the nodes have not met yet")
        try:
            return self._channel.ask(question, self._seat.index, *words)
        except TimeoutError:
            raise self._lost() from None
        except (OSError, Refused) as error:
            raise LaunchError(
                f"the first node, through which all nodes hear of each other, has left ({error})"
            ) from error

    def join(self) -> Place:
        """Meet the others; the first node in order hosts the store of the ranks."""
        if self._channel is None and self._seat.index == 0 and self._hosting is None:
            self._hosting = _Hosting(self._job, self._seat)
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        patience = REJOIN if self._attempt >= 0 else JOIN
        place = self._in_thread(lambda: self._join(patience), patience + 2 * SILENCE)
        self._looking, self._news = None, News()
        return place

    def _join(self, patience: float) -> Place:
        until = time.monotonic() + patience
        if self._channel is None:
            port, secret = self._job.master_port, self._job.key("supervisors")
            place = (self._seat.master_addr, port)
            self._channel = call(place, secret, wait=JOIN, silence=SILENCE, is_over=lambda: self._is_leaving)
        own = Member(self._seat.index, len(self._seat.host.slots), self._seat.host.name, self._address)
        self._come(own)
        found = self._ask("place", self._attempt)
        while "members" not in found:
            if "closed" in found:
                raise self._closed(*found["closed"])
            if found["gone"] and not found["are_enough"]:
                raise LaunchError(found["gone"])
            if time.monotonic() > until or self._is_leaving:
                raise LaunchError(self._too_few(found["waiting"], patience))
            time.sleep(POLL)
            found = self._ask("place", self._attempt)
        return self._take_place(own, found["attempt"], [Member(**member) for member in found["members"]])

    def _come(self, own: Member) -> None:
        """Say that this node wants to take part; another of its number may be about to be forgotten."""
        until = time.monotonic() + LOST + REJOIN / 4
        while taken := self._ask("want", asdict(own)):
            if time.monotonic() > until or self._is_leaving:
                raise LaunchError(str(taken))
            time.sleep(1.0)

    def _closed(self, words: str, was_asked: bool) -> LaunchError:
        said = f"the first node has left, and no other can take its place ({words or 'its ranks are done'})"
        return Stopped(said) if was_asked else LaunchError(said)

    def _too_few(self, waiting: int, patience: float) -> str:
        return (
            f"node {self._seat.index} has waited {patience:.0f} s at {self._seat.master_addr}:{self._job.master_port}, "
            f"and {waiting} of {self._job.min_nodes} nodes are there that want to start: see whether all of them run "
            "and can reach that port"
        )

    def _take_place(self, own: Member, attempt: int, members: Sequence[Member]) -> Place:
        """Host the store of the ranks, or wait to be told where it is."""
        before, self._attempt = self._attempt, attempt
        node, first_rank, world = settle(members, own.index)
        address = _reachable_address(own, members)
        if node == 0:
            self._ranks = StoreHost(address)
            self._ranks.serve_soon()
            self._ask("open_store", address, self._ranks.port)
        until = time.monotonic() + SILENCE
        while (found := self._ask("place", before)).get("master") is None:
            if time.monotonic() > until or found.get("attempt", -1) != attempt:
                # The node that was to host it has left in between: meet again without it.
                return self._join(REJOIN)
            time.sleep(POLL)
        master_addr, master_port = found["master"]
        interface = None if "GLOO_SOCKET_IFNAME" in self._env else interface_of(address)
        return Place(node, len(members), first_rank, world, master_addr, master_port, attempt, interface)

    def fail(self, failure: Failure) -> Failure | None:
        """The first to tell is the one that counts."""
        counted = self._in_thread(lambda: self._ask("fail", asdict(failure)), SILENCE)
        return None if counted is None else Failure(**counted)

    def finish(self) -> None:
        """Count this node among those whose ranks are done."""
        self._in_thread(lambda: self._ask("finish"), SILENCE)

    def news(self) -> News:
        """What the last look has brought; the next one is on its way."""
        if self._looking is None:
            self._looking, self._looked = self._pool.submit(self._look), time.monotonic()
        elif self._looking.done():
            self._news, self._looking = self._looking.result(), None
        elif time.monotonic() - self._looked > SILENCE:
            raise self._lost()
        return self._news

    def _look(self) -> News:
        return News.unpack(self._ask("look"))

    def request(self, word: str) -> None:
        """Ask all nodes for something."""
        self._in_thread(lambda: self._ask("request", word), SILENCE)

    def share(self, key: str, text: str) -> list[str]:
        """What every node has to say; those that do not answer within two seconds are left out."""
        return self._in_thread(lambda: self._share(key, text), SILENCE)

    def _share(self, key: str, text: str) -> list[str]:
        until = time.monotonic() + 2.0
        self._ask("share", key, text)
        is_all, said = self._ask("shared", key)
        while not is_all and time.monotonic() < until:
            time.sleep(POLL / 2)
            is_all, said = self._ask("shared", key)
        return list(said)

    def leave(self, words: str, *, was_asked: bool = False) -> None:
        """Take no further part; the first node waits a moment, so that the others can hear of it."""
        self._is_leaving = True
        if self._ranks is not None:
            self._ranks.close()
        if self._channel is not None:
            with suppress(RuntimeError):  # the first node may have left already
                self._in_thread(lambda: self._say_farewell(words, was_asked), FAREWELL)
        if self._hosting is not None:
            self._hosting.close()

    def _say_farewell(self, words: str, was_asked: bool) -> None:
        self._ask("leave", words, was_asked)
        until = time.monotonic() + FAREWELL - 0.5
        while self._hosting is not None and self._ask("others") and time.monotonic() < until:
            time.sleep(POLL / 5)


class _Hosting:
    """The first node's part: it keeps the rendezvous, and answers for it."""

    def __init__(self, job: Job, seat: Seat) -> None:
        self._rendezvous = Rendezvous(job.min_nodes, job.max_nodes)
        self._questions = {question.__name__: question for question in QUESTIONS}
        self._indices: dict[Peer, int] = {}
        self._now, self._ticked = 0.0, time.monotonic()
        self._server = ChannelServer(
            bind(seat.master_addr, job.master_port),
            job.key("supervisors"),
            answer=self._answer,
            gone=self._gone,
            tick=self._tick,
        )

    def close(self) -> None:
        self._server.close()

    def _tick(self) -> None:
        """Time for the rendezvous: where this process was held up, others who asked meanwhile were not silent."""
        before, self._ticked = self._ticked, time.monotonic()
        self._now += min(self._ticked - before, LONGEST_LOOK)
        self._rendezvous.tick(self._now)

    def _answer(self, peer: Peer, message: list[Any]) -> Any:
        name, index, *words = message
        if name == "want" and self._indices.get(peer) != index:
            if self._rendezvous.is_taken(index):
                return f"node {index} of this job is there already: give each node a --node_rank of its own"
            self._indices[peer] = index
        if self._indices.get(peer) != index:
            raise LookupError(f"this peer is not node {index}")
        return self._questions[name](self._rendezvous, index, *words)

    def _gone(self, peer: Peer) -> None:
        index = self._indices.pop(peer, None)
        if index is not None and index not in self._indices.values():
            self._rendezvous.hang_up(index)


def _reachable_address(own: Member, members: Sequence[Member]) -> str:
    """This node's address as the others see it. The first node's way to itself says nothing about that."""
    others = [member.address for member in members if member.index != own.index]
    way = next((other for other in others if not is_loopback(other)), None)
    return address_towards(way) if way is not None and is_loopback(own.address) else own.address


def address_towards(target: str) -> str:
    """The address of this machine that packets to a host leave from; nothing is sent."""
    try:
        family, address = resolve(target)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except (OSError, IndexError) as error:
        raise LaunchError(f"{target} cannot be reached from this machine ({error}): check --master_addr") from error


def interface_of(address: str) -> str | None:
    """The network interface that has an address."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def meet(job: Job, seat: Seat, env: Mapping[str, str]) -> Meeting:
    """The meeting that a job needs."""
    if job.max_nodes == 1 and not job.master_addr:
        return Alone(job)
    return Together(job, seat, env)


def members_of(texts: Sequence[str]) -> list[dict[str, Any]]:
    """What nodes have shared, one list of all."""
    return [entry for text in texts for entry in json.loads(text)]
