"""Where the ranks meet: the store that all of them reach, opened at the address that is known or that MPI passes on.

Before torch connects the ranks, each of them comes to the store, and who does not come is named. Each way in which this
fails has its own message.

[Note: fresh names]
Rank 0 publishes an offer with a fresh name; each rank answers under that name with a fresh name of its own; when all
have answered, rank 0 publishes the list of answers, and who finds its own name there is in. The default process group
then keeps its addresses under the name of the offer. This matters when the store outlives a rank: the agent of torchrun
keeps one store for all its restarts, where a new rank would read the addresses that dead ranks have left behind, and
fail with "Connection refused" (torch 2.13). A leftover offer, answer or list names nobody who is alive, so a new rank
waits for the new one.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn, TypedDict
from urllib.parse import urlsplit
from uuid import uuid4

from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from mizzen.comm.agreement import Ballot, wait_until
from mizzen.comm.backend import SignedStore
from mizzen.comm.discover import (
    LOOPBACK,
    MPI_SOURCES,
    Mpi,
    address_towards,
    choose_interface,
    is_here,
    with_store_address,
)
from mizzen.environment import World, environ, ranks_key
from mizzen.errors import CommError, MissingExtra
from mizzen.log import get_logger
from mizzen.network import listen, resolve
from mizzen.wording import and_more

TIMEOUT: Final = timedelta(minutes=10)
"""How long a collective, and the meeting, may take where nobody says otherwise."""
GRACE: Final = timedelta(seconds=5)
"""What a store gets on top to report a timeout of its own."""
SLICE: Final = timedelta(seconds=1)
"""How long one look at the store may block."""
PAUSE: Final = 0.05
"""Seconds between two questions within a look, for the first few hundred ranks."""
QUESTIONS: Final = 4096
"""How many questions a second the store may get from all ranks together."""
OUTWAIT: Final = 5.0
"""Seconds by which the others outwait rank 0, so that all of them give rank 0's word on who is missing."""
BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
SHOWN: Final = 16


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """How to join: what `init_distributed` was asked for, with its defaults filled in."""

    backend: str | None = None
    launchers: bool = True
    port: int = 29500
    timeout: timedelta = TIMEOUT
    init_method: str | None = None
    rank: int = -1
    size: int = -1
    is_verbose: bool = True


def reach_store(world: World, env: Mapping[str, str], options: JoinOptions) -> tuple[Store, World]:
    """Reach the store that all ranks share; the world comes back with its meeting place filled in."""
    method = None if options.init_method == "env://" else options.init_method
    if method is not None:
        return _reach_store_at(method, world, options)
    if world.size == 1:
        return HashStore(), world
    world = with_store_address(world, env, options.port)
    if world.master_addr is None and world.source in MPI_SOURCES:
        return _reach_store_by_mpi(world, env, options)
    if world.master_addr is None:
        raise CommError(
            f"this is rank {world.rank} of {world.size} by {world.source}, but nothing says where rank 0 is: set "
            "MASTER_ADDR to its host"
        )
    by_agent = world.source == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return open_store(world, options.timeout, hosting=world.rank == 0 and not by_agent), world


def _reach_store_at(method: str, world: World, options: JoinOptions) -> tuple[Store, World]:
    parts = urlsplit(method)
    if parts.scheme == "tcp" and parts.hostname and parts.port:
        world = replace(world, master_addr=parts.hostname, master_port=parts.port)
        return open_store(world, options.timeout, hosting=world.rank == 0), world
    if parts.scheme == "tcp":
        raise CommError(f"init_method={method!r}: say host and port, as in tcp://node1:29500")
    try:
        store, _, _ = next(iter(rendezvous(method, world.rank, world.size, timeout=options.timeout)))
    except (RuntimeError, ValueError) as error:
        raise CommError(f"init_method={method!r}: {error}; use env://, tcp://HOST:PORT or file:///PATH") from error
    return store, world


def _reach_store_by_mpi(world: World, env: Mapping[str, str], options: JoinOptions) -> tuple[Store, World]:
    try:
        mpi = Mpi.connect(world)
    except (MissingExtra, CommError) as error:
        if world.local_size != world.size:
            raise
        # All ranks are on this host, so that there is nothing to ask; only the port cannot be chosen together.
        get_logger().warning("%s; as all ranks are on one host, they meet at port %d", error, options.port)
        world = replace(world, master_addr=LOOPBACK)
        return open_store(world, options.timeout, hosting=world.rank == 0), world
    hosted: list[TCPStore] = []

    def open_here(zero: World, hosts: tuple[str, ...]) -> tuple[str, int]:
        elsewhere = next((host for host in hosts if host != hosts[0]), None)
        address = LOOPBACK if elsewhere is None else _own_address(elsewhere, env)
        hosted.append(_host_anywhere(replace(zero, master_addr=address, master_port=options.port), options.timeout))
        return address, hosted[0].port

    world = mpi.agree(open_here, socket.gethostname())
    return hosted[0] if hosted else open_store(world, options.timeout, hosting=False), world


def _own_address(other: str, env: Mapping[str, str]) -> str:
    found = choose_interface(other, env)
    if found is None:
        raise CommError(f"rank 0 has no network interface that leads to {other}: set MIZZEN_INTERFACE or MASTER_ADDR")
    return found.address


def _host_anywhere(world: World, timeout: timedelta) -> TCPStore:
    """Host at the port that was asked for, or at a free one: who learns it from MPI does not mind."""
    try:
        return open_store(world, timeout, hosting=True)
    except CommError:
        return open_store(replace(world, master_port=0), timeout, hosting=True)


def open_store(world: World, timeout: timedelta, *, hosting: bool) -> TCPStore:
    """Connect to the store at the world's meeting place, and host it if so asked."""
    if world.master_addr is None or world.master_port is None:
        raise AssertionError(f"no meeting place in {world}")
    host, port = world.master_addr, world.master_port

    def build() -> TCPStore:
        with _listener(host, port) if hosting else nullcontext() as listener:
            at = port if listener is None else listener.getsockname()[1]
            given: dict[str, Any] = {} if listener is None else {"master_listen_fd": os.dup(listener.fileno())}
            return TCPStore(
                *(host, at, world.size, hosting, timeout), wait_for_workers=False, multi_tenant=hosting, **given
            )

    try:
        return _within(timeout + GRACE, build)
    except (RuntimeError, TimeoutError) as error:
        raise CommError(_why_no_store(world, timeout, hosting, error)) from error


@contextmanager
def _listener(host: str, port: int) -> Iterator[socket.socket | None]:
    """A socket at the address that is meant; none where the port is taken, maybe by a store of this very process."""
    try:
        listener = listen(host, port)
    except OSError:
        yield None
        return
    with listener:
        yield listener


def _why_no_store(world: World, timeout: timedelta, hosting: bool, error: Exception) -> str:
    address, waited = f"{world.master_addr}:{world.master_port}", f"{timeout.total_seconds():.0f} s"
    who = f"rank {world.rank} of {world.size}"
    if "EADDRINUSE" in str(error):
        return (
            f"{who} cannot host the meeting at {address}: port {world.master_port} is taken on this host, most likely "
            "by another job. Set MASTER_PORT or distributed_port to a free one for all ranks; `mizzen run` finds one"
        )
    if not resolve(world.master_addr or ""):
        return f"{who}: the address of rank 0, {world.master_addr}, cannot be resolved: check MASTER_ADDR"
    if isinstance(error, TimeoutError) and _accepts(world):
        return f"{who} reached {address}, but what listens there is no store: check MASTER_PORT"
    if hosting and not is_here(world.master_addr or ""):
        source = address_towards(world.master_addr or "")
        return (
            f"{who} waited {waited} for itself at {address}: that address is not this host's, which is {source}. "
            "MASTER_ADDR must name the host where rank 0 runs"
        )
    return (
        f"{who} waited {waited} for rank 0 at {address}, and nothing answers there: see whether rank 0 has started, "
        f"whether all ranks have the same MASTER_ADDR and MASTER_PORT, and whether a firewall closes the port ({error})"
    )


def _accepts(world: World) -> bool:
    """Whether anything takes a connection at the meeting place. TCPStore may be late because it still tries."""
    try:
        with socket.create_connection((world.master_addr, world.master_port), GRACE.total_seconds()):
            return True
    except OSError:
        return False


def _within(limit: timedelta, call: Callable[[], TCPStore]) -> TCPStore:
    """What a call returns. TCPStore heeds no timeout once something accepts its connection and then keeps silent."""
    results: list[TCPStore] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  it is raised again by the thread that waits
            errors.append(error)
            if not isinstance(error, Exception):
                raise

    thread = threading.Thread(target=run, name="mizzen-join", daemon=True)
    thread.start()
    thread.join(limit.total_seconds())
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {limit.total_seconds():.0f} s")
    return results[0]


def store_address(world: World, options: JoinOptions) -> str:
    """The meeting place in words."""
    if options.init_method not in (None, "env://"):
        return str(options.init_method)
    return f"{world.master_addr}:{world.master_port}" if world.size > 1 else "this process"


class Answer(TypedDict):
    """What a rank says of itself."""

    id: str
    rank: int
    size: int
    host: str


class StoreLost(CommError):
    """The store went away while the ranks gathered."""


@dataclass(frozen=True, slots=True)
class Members:
    """Everybody has come: the fresh name of this meeting, and the host of every rank."""

    name: str
    hosts: tuple[str, ...]

    @property
    def host_count(self) -> int:
        """How many hosts the ranks are on."""
        return len(set(self.hosts))

    def with_local_rank(self, world: World, env: Mapping[str, str]) -> World:
        """The world with the local rank counted out, where no launcher has said it."""
        if "LOCAL_RANK" in env or world.source not in ("arguments", "torchrun"):
            return world
        here = self.hosts[world.rank]
        return replace(world, local_rank=self.hosts[: world.rank].count(here), local_size=self.hosts.count(here))


def wait_for_ranks(store: Store, world: World, timeout: timedelta, where: str) -> Members:
    """Wait until every rank of the world has come to the store; who is missing is named by all who are there."""
    shared: Any = PrefixStore("mizzen/rendezvous", store)
    joiner = _Joiner(
        SignedStore(shared, ranks_key(environ())), world, time.monotonic() + timeout.total_seconds(), where
    )
    own = Answer(id=uuid4().hex, rank=world.rank, size=world.size, host=_host())
    try:
        return _call(joiner, own) if world.rank == 0 else _come(joiner, own)
    except DistError as error:
        raise StoreLost(
            f"{joiner} lost the store at {where} while the ranks gathered: the process that hosts it has left ({error})"
        ) from error


@dataclass(frozen=True, slots=True)
class _Joiner:
    """One rank at the meeting."""

    store: SignedStore
    world: World
    deadline: float
    where: str

    def __str__(self) -> str:
        return f"rank {self.world.rank} of {self.world.size}"

    def sees(self, is_there: Callable[[], bool]) -> bool:
        """Whether something comes to the store within one slice."""
        return wait_until(is_there, SLICE.total_seconds(), pause=max(PAUSE, self.world.size / QUESTIONS))


def _call(joiner: _Joiner, own: Answer) -> Members:
    """Rank 0's part: offer, collect the answers, publish them."""
    store, size, name = joiner.store, joiner.world.size, own["id"]
    store.set("offer", json.dumps({"id": name, "size": size}))
    answers = {0: own}
    while missing := [rank for rank in range(size) if rank not in answers]:
        ballot = Ballot(store, _answers(name), missing)
        joiner.sees(ballot.is_complete)
        for rank in missing:
            if (value := ballot.value(rank)) is not None:
                answers[rank] = json.loads(value)
        if store.check([_surplus(name)]):
            extra = json.loads(store.get(_surplus(name)))
            answers[extra["rank"]] = extra
        for rank, answer in answers.items():
            if answer["size"] != size:
                _refuse(joiner, answers, _disagreement(joiner, rank, answer))
        if len(answers) < size and time.monotonic() > joiner.deadline:
            _refuse(joiner, answers, _absence(joiner, answers))
    row = [answers[rank] for rank in range(size)]
    store.set(_result(name), json.dumps({"row": row}))
    return Members(name, tuple(answer["host"] for answer in row))


def _refuse(joiner: _Joiner, answers: Mapping[int, Answer], message: str) -> NoReturn:
    """Fail together with all who have answered."""
    joiner.store.set(_result(answers[0]["id"]), json.dumps({"error": message, "row": list(answers.values())}))
    time.sleep(SLICE.total_seconds() / 2)  # this process may host the store: let the others read it
    raise CommError(message)


def _disagreement(joiner: _Joiner, rank: int, answer: Answer) -> str:
    return (
        f"rank 0 expects {joiner.world.size} ranks at {joiner.where}, but rank {rank} on {_short(answer['host'])} "
        f"expects {answer['size']}: start all ranks with the same WORLD_SIZE"
    )


def _absence(joiner: _Joiner, answers: Mapping[int, Answer]) -> str:
    missing = [str(rank) for rank in range(joiner.world.size) if rank not in answers]
    hosts = sorted({_short(entry["host"]) for entry in answers.values()})
    return (
        f"{joiner.world.size} ranks were waited for at {joiner.where}, and {len(answers)} have come in time (on "
        f"{and_more(hosts, SHOWN)}); missing: rank {and_more(missing, SHOWN)}. See whether those were started, with "
        "the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE; init_distributed(timeout=...) or MIZZEN_TIMEOUT waits longer"
    )


def _come(joiner: _Joiner, own: Answer) -> Members:
    """Every other rank's part: answer every offer until the result of one of them has our name."""
    store, answered = joiner.store, set[str]()
    while time.monotonic() < joiner.deadline + OUTWAIT:
        if not joiner.sees(lambda: store.check(["offer"])):
            continue
        offer = json.loads(store.get("offer"))
        name: str = offer["id"]
        if name not in answered:
            answered.add(name)
            said = json.dumps(own)
            if own["rank"] < offer["size"]:
                Ballot(store, _answers(name), (own["rank"],)).cast(own["rank"], said.encode())
            else:
                store.set(_surplus(name), said)
        result_key = _result(name)
        if not joiner.sees(lambda: store.check([result_key])):  # noqa: B023  asked before the next turn
            continue
        result = json.loads(store.get(result_key))
        if all(answer["id"] != own["id"] for answer in result["row"]):
            time.sleep(0.05)  # that was a meeting of others, before our time
            continue
        if "error" in result:
            raise CommError(result["error"])
        return Members(name, tuple(answer["host"] for answer in result["row"]))
    if not answered:
        raise CommError(
            f"{joiner} waited for rank 0 at {joiner.where}, but it has not come: see whether it was started"
        )
    raise CommError(
        f"{joiner} came to {joiner.where}, but rank 0 has not counted it: another process has come as rank "
        f"{joiner.world.rank}, or rank 0 has ended. Check the ranks that the launcher gives out"
    )


def _answers(name: str) -> str:
    return f"answer/{name}"


def _surplus(name: str) -> str:
    """Where a rank answers that rank 0 does not count on."""
    return f"surplus/{name}"


def _result(name: str) -> str:
    return f"result/{name}"


def _host() -> str:
    """A name of this host's own: clones of one image often share the first part, containers of one host the second."""
    return f"{socket.gethostname()}/{BOOT.read_text().strip() if BOOT.exists() else ''}"


def _short(host: str) -> str:
    return host.partition("/")[0]
