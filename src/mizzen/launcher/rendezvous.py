"""How supervisors find each other: one alone, or several through the first of them.

[Note: two stores]
What supervisors tell each other goes through the first node, at the job's rendezvous port, for as long as the job lives
(`rendezvous_state.py` is what it keeps, `channel.py` how it is reached). The ranks of an attempt get a store of torch,
at a port that the system chose, hosted by the first supervisor of that attempt: so no attempt ever reads an address
that a dead one has left, and no two jobs want the same port. The port is bound before its number is told to anybody.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Protocol, TypeVar

import psutil

from mizzen.errors import LaunchError
from mizzen.launcher.channel import Channel, ChannelServer, Peer, Refused, connect
from mizzen.launcher.hosts import Host
from mizzen.launcher.job import Job
from mizzen.launcher.outcome import Failure
from mizzen.launcher.rendezvous_state import (
    LONGEST_LOOK,
    LOST,
    QUESTIONS,
    Assignment,
    NodeInfo,
    RendezvousState,
    RendezvousStatus,
    assign_ranks,
)
from mizzen.network import is_loopback, listen, resolve

Result = TypeVar("Result")

LOOPBACK: Final = "127.0.0.1"
JOIN: Final = 600.0
"""Seconds for which the other nodes are waited for at the start."""
POLL: Final = 0.1
"""Seconds between two questions of a node that waits for something."""
REJOIN: Final = 60.0
"""Seconds in which nodes that all want another attempt must have met."""
SILENCE: Final = 30.0
"""Seconds without an answer from the first node after which it counts as lost."""
GOODBYE: Final = 5.0
"""Seconds for which the first node waits at the end for the others to have heard of it."""


class JobStopped(LaunchError):
    """The first node was asked to stop, and the job with it."""


class PortTaken(LaunchError):
    """The rendezvous port belongs to somebody else."""


def bind(name: str, port: int) -> socket.socket:
    """A socket that listens at the address that others call `name`."""
    try:
        return listen(name, port)
    except OSError as error:
        raise PortTaken(
            f"port {port} of this machine cannot be had ({error.strerror}), most likely because another job has "
            "it: leave --master_port out and a free one is found, or name another"
        ) from error


class StoreHost:
    """A store for the ranks of one attempt. Its port is bound at once; torch answers there as soon as it is loaded."""

    def __init__(self, address: str, port: int = 0) -> None:
        self._socket = bind(address, port)
        self.port: int = self._socket.getsockname()[1]
        self.address = address
        self.store: Any = None
        self._lock = threading.Lock()
        self._is_closed = False

    def serve(self) -> None:
        """Load torch and answer at the port."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with self._lock:
            if self._is_closed:
                return
            self.store = TCPStore(
                self.address,
                self.port,
                None,
                True,
                wait_for_workers=False,
                master_listen_fd=os.dup(self._socket.fileno()),
            )

    def serve_soon(self) -> None:
        """Serve in a thread: loading torch takes as long as the ranks take to need the store."""
        threading.Thread(target=self.serve, name="mizzen-store", daemon=True).start()

    def close(self) -> None:
        """Free the port."""
        with self._lock:
            self._is_closed = True
            self._socket.close()
            self.store = None


class Rendezvous(Protocol):
    """How supervisors deal with each other. Each calls join, then the rest while ranks run, and leave at the end."""

    def join(self) -> Assignment:
        """Wait until the next attempt can start."""

    def report_failure(self, failure: Failure) -> Failure | None:
        """Tell the others of a failure; the one that counts for this attempt comes back, with its number.

        None counts where nodes are gone: `status` says who.
        """

    def report_done(self) -> None:
        """Say that the ranks of this node are done."""

    def status(self) -> RendezvousStatus:
        """What is known now; this never waits. Raises a LaunchError when nothing was heard for long."""

    def request(self, word: str) -> None:
        """Ask all nodes for something."""

    def share(self, key: str, text: str) -> list[str]:
        """What every node has to say under this key; those that do not answer in a moment are left out."""

    def leave(self, words: str, *, was_asked: bool = False) -> None:
        """Take no further part; the others learn why, and whether this node was asked to."""


class SingleNodeRendezvous:
    """One node: nobody to wait for, nobody to tell."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._store_host: StoreHost | None = None
        self._attempts = self._failures = 0

    def join(self) -> Assignment:
        """A fresh port each time, unless the user has fixed one."""
        if self._store_host is not None:
            self._store_host.close()
        self._store_host = StoreHost(LOOPBACK, self._job.master_port)
        self._store_host.serve_soon()
        slots = len(self._job.hosts[0].slots)
        self._attempts += 1
        return Assignment(0, 1, 0, slots, LOOPBACK, self._store_host.port, attempt=self._attempts - 1)

    def report_failure(self, failure: Failure) -> Failure:
        """Count the failure."""
        self._failures += 1
        return replace(failure, number=self._failures)

    def report_done(self) -> None:
        """Nobody to tell."""

    def status(self) -> RendezvousStatus:
        """Nobody else has anything to do."""
        return RendezvousStatus(are_finished=True)

    def request(self, word: str) -> None:
        """Nobody to ask."""

    def share(self, key: str, text: str) -> list[str]:
        """Only what this node says."""
        return [text]

    def leave(self, words: str, *, was_asked: bool = False) -> None:
        """Free the port."""
        if self._store_host is not None:
            self._store_host.close()


@dataclass(frozen=True, slots=True)
class Node:
    """Which node of a job this is, and what it has."""

    index: int
    host: Host
    master_addr: str


class MultiNodeRendezvous:
    """Several nodes; the first of them keeps what all of them know."""

    def __init__(self, job: Job, node: Node, env: Mapping[str, str]) -> None:
        self._job, self._node, self._env = job, node, env
        self._address = address_towards(node.master_addr)
        self._state_host: _RendezvousHost | None = None
        self._channel: Channel | None = None
        self._attempt = -1
        self._store_host: StoreHost | None = None
        self._is_leaving = False
        # [Note: a first node that does not answer]
        # When the first node vanishes without a word, a question to it is never answered. So all of them are put by a
        # thread, and the supervisor, which must watch its ranks and its signals, waits for none of them for long.
        self._pool = ThreadPoolExecutor(1, "mizzen-asking")
        self._asking: Future[RendezvousStatus] | None = None
        self._asked_at = 0.0
        self._status = RendezvousStatus()

    def _in_thread(self, call: Callable[[], Result], patience: float) -> Result:
        """Let the asking thread do something, and wait for its answer."""
        try:
            return self._pool.submit(call).result(patience)
        except TimeoutError:
            raise self._lost() from None

    def _lost(self) -> LaunchError:
        return LaunchError(
            f"node {self._node.index} has not heard from the first node at {self._node.master_addr}:"
            f"{self._job.master_port} for {SILENCE:.0f} s: that node, or the network to it, is gone"
        )

    def _ask(self, question: str, *words: Any) -> Any:
        """Put a question to the first node. Only the thread does this."""
        if self._channel is None:
            raise AssertionError("the nodes have not met yet")
        try:
            return self._channel.ask(question, self._node.index, *words)
        except TimeoutError:
            raise self._lost() from None
        except (OSError, Refused) as error:
            raise LaunchError(
                f"the first node, through which all nodes hear of each other, has left ({error})"
            ) from error

    def join(self) -> Assignment:
        """Wait for the others; the first node in order hosts the store of the ranks."""
        if self._channel is None and self._node.index == 0 and self._state_host is None:
            self._state_host = _RendezvousHost(self._job, self._node)
        if self._store_host is not None:
            self._store_host.close()
            self._store_host = None
        patience = REJOIN if self._attempt >= 0 else JOIN
        assignment = self._in_thread(lambda: self._join(patience), patience + 2 * SILENCE)
        self._asking, self._status = None, RendezvousStatus()
        return assignment

    def _join(self, patience: float) -> Assignment:
        until = time.monotonic() + patience
        if self._channel is None:
            port, secret = self._job.master_port, self._job.key("supervisors")
            address = (self._node.master_addr, port)
            self._channel = connect(address, secret, wait=JOIN, silence=SILENCE, is_over=lambda: self._is_leaving)
        own = NodeInfo(self._node.index, len(self._node.host.slots), self._node.host.name, self._address)
        self._ask_to_join(own)
        found = self._ask("assignment", self._attempt)
        while "nodes" not in found:
            if "closed" in found:
                words, was_asked = found["closed"]
                said = f"the first node has left, and no other can take its place ({words or 'its ranks are done'})"
                raise JobStopped(said) if was_asked else LaunchError(said)
            if found["gone"] and not found["are_enough"]:
                raise LaunchError(found["gone"])
            if time.monotonic() > until or self._is_leaving:
                raise LaunchError(self._too_few(found["waiting"], patience))
            time.sleep(POLL)
            found = self._ask("assignment", self._attempt)
        return self._take_assignment(own, found["attempt"], [NodeInfo(**node) for node in found["nodes"]])

    def _ask_to_join(self, own: NodeInfo) -> None:
        """Say that this node wants to take part; another of its number may be about to be forgotten."""
        until = time.monotonic() + LOST + REJOIN / 4
        while taken := self._ask("join", asdict(own)):
            if time.monotonic() > until or self._is_leaving:
                raise LaunchError(str(taken))
            time.sleep(1.0)

    def _too_few(self, waiting: int, patience: float) -> str:
        return (
            f"node {self._node.index} has waited {patience:.0f} s at {self._node.master_addr}:{self._job.master_port}, "
            f"and {waiting} of {self._job.min_nodes} nodes are there that want to start: see whether all of them run "
            "and can reach that port"
        )

    def _take_assignment(self, own: NodeInfo, attempt: int, nodes: Sequence[NodeInfo]) -> Assignment:
        """Host the store of the ranks, or wait to be told where it is."""
        before, self._attempt = self._attempt, attempt
        number, first_rank, world = assign_ranks(nodes, own.index)
        address = _reachable_address(own, nodes)
        if number == 0:
            self._store_host = StoreHost(address)
            self._store_host.serve_soon()
            self._ask("open_store", address, self._store_host.port)
        until = time.monotonic() + SILENCE
        while (found := self._ask("assignment", before)).get("master") is None:
            if time.monotonic() > until or found.get("attempt", -1) != attempt:
                # The node that was to host it has left in between: join again without it.
                return self._join(REJOIN)
            time.sleep(POLL)
        master_addr, master_port = found["master"]
        interface = None if "GLOO_SOCKET_IFNAME" in self._env else interface_of(address)
        return Assignment(number, len(nodes), first_rank, world, master_addr, master_port, attempt, interface)

    def report_failure(self, failure: Failure) -> Failure | None:
        """The first to tell is the one that counts."""
        counted = self._in_thread(lambda: self._ask("report_failure", asdict(failure)), SILENCE)
        return None if counted is None else Failure(**counted)

    def report_done(self) -> None:
        """Count this node among those whose ranks are done."""
        self._in_thread(lambda: self._ask("report_done"), SILENCE)

    def status(self) -> RendezvousStatus:
        """The last answer of the first node; the next question is on its way."""
        if self._asking is None:
            self._asking, self._asked_at = (
                self._pool.submit(lambda: RendezvousStatus.unpack(self._ask("status"))),
                time.monotonic(),
            )
        elif self._asking.done():
            self._status, self._asking = self._asking.result(), None
        elif time.monotonic() - self._asked_at > SILENCE:
            raise self._lost()
        return self._status

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
        if self._store_host is not None:
            self._store_host.close()
        if self._channel is not None:
            with suppress(RuntimeError):  # the first node may have left already
                self._in_thread(lambda: self._say_goodbye(words, was_asked), GOODBYE)
        if self._state_host is not None:
            self._state_host.close()

    def _say_goodbye(self, words: str, was_asked: bool) -> None:
        self._ask("leave", words, was_asked)
        until = time.monotonic() + GOODBYE - 0.5
        while self._state_host is not None and self._ask("remaining") and time.monotonic() < until:
            time.sleep(POLL / 5)


class _RendezvousHost:
    """The first node's part: it keeps the state, and answers the questions of all nodes."""

    def __init__(self, job: Job, node: Node) -> None:
        self._state = RendezvousState(job.min_nodes, job.max_nodes)
        self._questions = {question.__name__: question for question in QUESTIONS}
        self._indices: dict[Peer, int] = {}
        self._now, self._ticked = 0.0, time.monotonic()
        self._server = ChannelServer(
            bind(node.master_addr, job.master_port),
            job.key("supervisors"),
            answer=self._answer,
            gone=self._gone,
            tick=self._tick,
        )

    def close(self) -> None:
        self._server.close()

    def _tick(self) -> None:
        """Tell the state what time it is: while this process was held up, nodes that asked were not silent."""
        before, self._ticked = self._ticked, time.monotonic()
        self._now += min(self._ticked - before, LONGEST_LOOK)
        self._state.tick(self._now)

    def _answer(self, peer: Peer, message: list[Any]) -> Any:
        name, index, *words = message
        if name == "join" and self._indices.get(peer) != index:
            if self._state.is_taken(index):
                return f"node {index} of this job is there already: give each node a --node_rank of its own"
            self._indices[peer] = index
        if self._indices.get(peer) != index:
            raise LookupError(f"this peer is not node {index}")
        return self._questions[name](self._state, index, *words)

    def _gone(self, peer: Peer) -> None:
        index = self._indices.pop(peer, None)
        if index is not None and index not in self._indices.values():
            self._state.disconnect(index)


def _reachable_address(own: NodeInfo, nodes: Sequence[NodeInfo]) -> str:
    """This node's address as the others see it. The first node's way to itself says nothing about that."""
    others = [node.address for node in nodes if node.index != own.index]
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


def open_rendezvous(job: Job, node: Node, env: Mapping[str, str]) -> Rendezvous:
    """The rendezvous that a job needs."""
    if job.max_nodes == 1 and not job.master_addr:
        return SingleNodeRendezvous(job)
    return MultiNodeRendezvous(job, node, env)
