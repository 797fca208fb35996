"""How supervisors meet: one alone, or several by the rendezvous of torch elastic. torch is loaded on use.

[Note: two stores]
Supervisors share one store for as long as the job lives; the first node hosts it at the job's meeting port. The ranks
of an attempt get a store of their own, at a port that the system chose, hosted by the first supervisor of that attempt:
so no attempt ever reads an address that a dead one has left, and no two jobs want the same port. The port is bound
before its number is told to anybody.

[Note: the rendezvous, not the agent]
Of torch elastic we use the rendezvous: who is there, with keep-alives and rounds. docs/decisions/0015 says why not the
agent. TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 must be in the environment of this process, or a node that joins later waits
for an address that nobody publishes (torch 2.13).

[Note: who is gone]
The rendezvous forgets a node that was silent for some seconds, and tells nobody. So every supervisor counts a beat with
each look at the store of its attempt, and says why when it leaves. The first node, without whose store there is no job,
watches both and says for all who is gone: so every node names the same cause. Its own silence is that of the store.
"""

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import psutil

from mizzen.errors import LaunchError
from mizzen.launcher.failure import Failure
from mizzen.launcher.hosts import Host
from mizzen.launcher.job import Job
from mizzen.launcher.place import Member, Place, settle
from mizzen.launcher.pulse import LOST, Pulse
from mizzen.launcher.store import LOOPBACK, StoreHost, connect

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

Result = TypeVar("Result")

JOIN: Final = timedelta(minutes=10)
LAST_CALL: Final = timedelta(seconds=3)
"""How long an elastic job that could start waits for more nodes."""
KEEP_ALIVE: Final = 1
MISSES: Final = 4
"""A node that has not been heard of for so many seconds is gone."""
REJOIN: Final = 60.0
"""Seconds in which nodes that all want another attempt must have met."""
SILENCE: Final = 30.0
"""Seconds without an answer from the store after which the node that hosts it counts as lost."""
FAREWELL: Final = 5.0
"""Seconds for which the host of the store waits at the end for the others to have read it."""


@dataclass(frozen=True, slots=True)
class News:
    """What is known of the other nodes."""

    failure: Failure | None = None
    """The one that counts for this attempt."""
    request: str = ""
    """What some node has asked all for."""
    has_changed: bool = False
    """Whether nodes wait to join."""
    are_finished: bool = False
    """Whether the ranks of all nodes are done."""
    gone: str = ""
    """Who has left before its ranks were done, or is lost, in words."""
    are_enough: bool = False
    """Whether those that remain may go on without them."""
    is_in_doubt: bool = False
    """Whether a node that is needed has been silent for a while, so that it may be gone."""


class Meeting(Protocol):
    """How a supervisor deals with the others. It calls join, then the rest while ranks run, leave at the end."""

    def join(self) -> Place:
        """Wait until the next attempt can start."""

    def fail(self, failure: Failure) -> Failure:
        """Tell the others of a failure; the one that counts for this attempt comes back, with its number."""

    def finish(self) -> None:
        """Say that the ranks of this node are done."""

    def news(self) -> News:
        """What is known now; this never waits. Raises a LaunchError when nothing was heard for long."""

    def request(self, word: str) -> None:
        """Ask all nodes for something."""

    def share(self, key: str, text: str) -> list[str]:
        """What every node has to say under this key; those that do not answer in a moment are left out."""

    def leave(self, words: str) -> None:
        """Take no further part; the others learn why."""


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
        return Failure.unpack(json.dumps(asdict(failure) | {"number": self._failures}))

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

    def leave(self, words: str) -> None:
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
    """Several nodes, by torch elastic's rendezvous over a store that the first of them hosts."""

    def __init__(self, job: Job, seat: Seat, env: Mapping[str, str]) -> None:
        self._job, self._seat, self._env = job, seat, env
        self._address = address_towards(seat.master_addr)
        self._own: StoreHost | None = None
        self._root: Any = None
        self._handler: Any = None
        self._round: Store | None = None
        self._members: list[Member] = []
        self._rank = 0
        self._pulse = Pulse(0, 0.0)
        self._gone: dict[int, str] = {}
        self._is_in_doubt = False
        self._ranks: StoreHost | None = None
        # [Note: a store that does not answer]
        # When the host of the store vanishes without a word, a call to the store never returns. So all calls are made
        # by a thread, and the supervisor, which must heed its ranks and its signals, waits for none of them for long.
        self._pool = ThreadPoolExecutor(1, "mizzen-meeting")
        self._looking: Future[News] | None = None
        self._looked = 0.0
        self._news = News()

    def _ask(self, call: Callable[[], Result], patience: float) -> Result:
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

    def join(self) -> Place:
        """Meet the others; the first node in order hosts the store of the ranks."""
        if self._handler is None:
            found = self._ask(lambda: _connect(self._job, self._seat, self._address), JOIN.total_seconds() + SILENCE)
            self._own, self._root, self._handler = found
        if self._round is not None:
            self._gather()
        patience = REJOIN if self._round is not None else JOIN.total_seconds()
        place = self._ask(self._join_by_all_means, patience + SILENCE)
        self._looking, self._news = None, News()
        return place

    def _gather(self) -> None:
        """Wait until so many nodes want another attempt as it needs, but for none that is gone."""

        def look() -> tuple[News, int]:
            store = self._store()
            store.set(f"again/{self._rank}", "")
            again = sum(store.check([f"again/{rank}"]) for rank in range(len(self._members)))
            return self._look(), again + self._handler.num_nodes_waiting()

        until = time.monotonic() + REJOIN
        news, coming = self._ask(look, SILENCE)
        while coming < self._job.min_nodes:
            if time.monotonic() > until or (news.gone and not news.are_enough):
                few = f"{coming} of {self._job.min_nodes} nodes want another attempt after {REJOIN:.0f} s"
                raise LaunchError(news.gone or few)
            time.sleep(KEEP_ALIVE / 4)
            news, coming = self._ask(look, SILENCE)

    def _join_by_all_means(self) -> Place:
        from torch.distributed import DistError
        from torch.distributed.elastic.rendezvous import RendezvousError

        while True:
            try:
                return self._join()
            except (DistError, RendezvousError) as error:
                if isinstance(error, RendezvousError) or self._is_lost():
                    raise LaunchError(
                        f"node {self._seat.index} has not met {self._job.min_nodes} nodes at {self._seat.master_addr}:"
                        f"{self._job.master_port} ({error or type(error).__name__}): see whether all of them run and "
                        "can reach that port"
                    ) from error
                # A node has left between the rendezvous and here: meet again without it.

    def _join(self) -> Place:
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None
        info = self._handler.next_rendezvous()
        self._round, self._rank = info.store, info.rank
        self._round.set_timeout(timedelta(seconds=30))
        own = Member(self._seat.index, len(self._seat.host.slots), self._seat.host.name, self._address)
        self._round.set(f"member/{info.rank}", json.dumps(asdict(own)))
        self._members = [Member(**json.loads(self._round.get(f"member/{rank}"))) for rank in range(info.world_size)]
        self._pulse, self._gone, self._is_in_doubt = Pulse(info.world_size, time.monotonic()), {}, False
        node, first_rank, world = settle(self._members, own.index)
        address = _reachable_address(own, self._members)
        if node == 0:
            self._ranks = StoreHost("::" if ":" in address else "0.0.0.0")
            self._ranks.serve()
            attempt = self._root.add("attempts", 1) - 1
            self._round.set("master", json.dumps([address, self._ranks.port, attempt]))
        master_addr, master_port, attempt = json.loads(self._round.get("master"))
        interface = None if "GLOO_SOCKET_IFNAME" in self._env else interface_of(address)
        return Place(node, info.world_size, first_rank, world, master_addr, master_port, attempt, interface)

    def _is_lost(self) -> bool:
        try:
            self._root.check(["anything"])
        except RuntimeError:
            return True
        return False

    def fail(self, failure: Failure) -> Failure:
        """The first to tell is the one that counts."""
        return self._ask(lambda: self._fail(failure), SILENCE)

    def _fail(self, failure: Failure) -> Failure:
        store = self._store()
        number = self._root.add("failures", 0) + 1
        text = json.dumps(asdict(failure) | {"number": number})
        won = store.compare_set("failure", "", text).decode()
        if won == text:
            self._root.add("failures", 1)
        return Failure.unpack(won)

    def finish(self) -> None:
        """Count this node among those whose ranks are done."""
        self._ask(lambda: self._store().set(f"finished/{self._rank}", ""), SILENCE)
        self._ask(lambda: self._store().add("finished", 1), SILENCE)

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
        store = self._store()
        store.add(f"beat/{self._rank}", 1)
        if self._own is not None:
            self._judge(store)
        # Before the count of those that are done: a node leaves after that.
        gone, are_enough = json.loads(store.get("gone")) if store.check(["gone"]) else ("", False)
        has_changed = self._handler.num_nodes_waiting() > 0
        return News(
            failure=Failure.unpack(store.get("failure")) if store.check(["failure"]) else None,
            request=store.get("request").decode() if store.check(["request"]) else "",
            has_changed=has_changed,
            are_finished=int(store.add("finished", 0)) >= len(self._members),
            gone=gone,
            are_enough=are_enough or has_changed,
            is_in_doubt=store.check(["doubt"]) and store.get("doubt") == b"1",
        )

    def _judge(self, store: "Store") -> None:
        """Say for all who is gone; a node whose ranks are done may go."""
        ranks = range(len(self._members))
        silent = self._pulse.silent([int(store.add(f"beat/{rank}", 0)) for rank in ranks], time.monotonic())
        for rank in ranks:
            has_left = store.check([f"left/{rank}"])
            if rank not in self._gone and (has_left or rank in silent) and not store.check([f"finished/{rank}"]):
                words = store.get(f"left/{rank}").decode() if has_left else ""
                self._gone[rank] = _gone(self._members[rank], has_left, words)
                are_enough = len(self._members) - len(self._gone) >= self._job.min_nodes
                store.set("gone", json.dumps(["; ".join(self._gone.values()), are_enough]))
        doubtful = [rank for rank in self._pulse.doubtful if not store.check([f"finished/{rank}"])]
        is_in_doubt = bool(doubtful) and len(self._members) - len({*self._gone, *doubtful}) < self._job.min_nodes
        if is_in_doubt != self._is_in_doubt:
            self._is_in_doubt = is_in_doubt
            store.set("doubt", "1" if is_in_doubt else "0")

    def request(self, word: str) -> None:
        """Ask all nodes for something."""
        self._ask(lambda: self._store().set("request", word), SILENCE)

    def share(self, key: str, text: str) -> list[str]:
        """What every node has to say; those that do not answer within two seconds are left out."""
        return self._ask(lambda: self._share(key, text), SILENCE)

    def _share(self, key: str, text: str) -> list[str]:
        store, until = self._store(), time.monotonic() + 2.0
        store.set(f"{key}/{self._rank}", text)
        keys = [f"{key}/{rank}" for rank in range(len(self._members))]
        while not store.check(keys) and time.monotonic() < until:
            time.sleep(0.05)
        return [store.get(name).decode() for name in keys if store.check([name])]

    def _store(self) -> "Store":
        if self._round is None:
            raise AssertionError("the nodes have not met yet")
        return self._round

    def leave(self, words: str) -> None:
        """Take no further part; who hosts the store waits a moment, so that the others can read it."""
        if self._ranks is not None:
            self._ranks.close()
        if self._round is None:
            return  # nobody has met us
        with suppress(RuntimeError):  # the host of the store may have left already; ours is a LaunchError
            self._ask(lambda: self._say_farewell(words), FAREWELL)

    def _say_farewell(self, words: str) -> None:
        store = self._store()
        store.set(f"left/{self._rank}", words)
        if self._own is None:
            return
        if not self._gone:
            store.set("gone", json.dumps([_gone(self._members[self._rank], True, words), False]))
        others = [f"left/{rank}" for rank in range(len(self._members)) if rank not in (self._rank, *self._gone)]
        until = time.monotonic() + FAREWELL
        while others and not store.check(others) and time.monotonic() < until - 0.5:
            time.sleep(0.02)


def _connect(job: Job, seat: Seat, address: str) -> tuple[StoreHost | None, Any, Any]:
    """The store of the supervisors, which the first of them hosts, and the rendezvous over it."""
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

    own = StoreHost("::" if ":" in seat.master_addr else "0.0.0.0", job.master_port) if seat.index == 0 else None
    if own is not None:
        own.serve()
    root = own.store if own is not None else connect(seat.master_addr, job.master_port, JOIN)
    handler = DynamicRendezvousHandler.from_backend(
        job.id,
        root,
        C10dRendezvousBackend(root, job.id),
        job.min_nodes,
        job.max_nodes,
        local_addr=address,
        timeout=RendezvousTimeout(join=JOIN, last_call=LAST_CALL),
        keep_alive_interval=KEEP_ALIVE,
        keep_alive_max_attempt=MISSES,
    )
    return own, root, handler


def _reachable_address(own: Member, members: Sequence[Member]) -> str:
    """This node's address as the others see it. The first node's way to itself says nothing about that."""
    others = [member.address for member in members if member.index != own.index]
    way = next((other for other in others if not other.startswith("127.")), None)
    return address_towards(way) if way is not None and own.address.startswith("127.") else own.address


def _gone(member: Member, has_left: bool, words: str) -> str:
    """What is said of a node that is gone."""
    how = "has left" if has_left else f"is lost: its supervisor has not been heard of for {LOST:.0f} s"
    return f"node {member.index} ({member.host}) {how}" + (f": {words}" if words else "")


def address_towards(target: str) -> str:
    """The address of this machine that packets to a host leave from; nothing is sent."""
    try:
        family, _, _, _, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
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
