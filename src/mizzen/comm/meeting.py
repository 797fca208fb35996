"""Where the ranks meet: the store that all of them reach, opened at the address that is known or that MPI passes on.

Each way in which this fails has its own message. Who has come is `roll.py`'s business.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from torch.distributed import HashStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from mizzen.comm.discover import LOOPBACK, MPI_SOURCES, Mpi, with_meeting_place
from mizzen.comm.interface import address_towards, choose_interface, is_here
from mizzen.environment import World
from mizzen.errors import CommError, MissingExtra
from mizzen.log import get_logger
from mizzen.network import listen, resolve

TIMEOUT: Final = timedelta(minutes=10)
"""How long a collective, and the meeting, may take where nobody says otherwise."""
GRACE: Final = timedelta(seconds=5)
"""What a store gets on top to report a timeout of its own."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How to join: what `init_distributed` was asked for, with its defaults filled in."""

    backend: str | None = None
    launchers: bool = True
    port: int = 29500
    timeout: timedelta = TIMEOUT
    init_method: str | None = None
    rank: int = -1
    size: int = -1
    is_verbose: bool = True


def meet(world: World, env: Mapping[str, str], terms: Terms) -> tuple[Store, World]:
    """Reach the store that all ranks share; the world comes back with its meeting place filled in."""
    method = None if terms.init_method == "env://" else terms.init_method
    if method is not None:
        return _meet_at(method, world, terms)
    if world.size == 1:
        return HashStore(), world
    world = with_meeting_place(world, env, terms.port)
    if world.master_addr is None and world.source in MPI_SOURCES:
        return _meet_by_mpi(world, env, terms)
    if world.master_addr is None:
        raise CommError(
            f"this is rank {world.rank} of {world.size} by {world.source}, but nothing says where rank 0 is: set "
            "MASTER_ADDR to its host"
        )
    by_agent = world.source == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return open_store(world, terms.timeout, hosting=world.rank == 0 and not by_agent), world


def _meet_at(method: str, world: World, terms: Terms) -> tuple[Store, World]:
    parts = urlsplit(method)
    if parts.scheme == "tcp" and parts.hostname and parts.port:
        world = replace(world, master_addr=parts.hostname, master_port=parts.port)
        return open_store(world, terms.timeout, hosting=world.rank == 0), world
    if parts.scheme == "tcp":
        raise CommError(f"init_method={method!r}: say host and port, as in tcp://node1:29500")
    try:
        store, _, _ = next(iter(rendezvous(method, world.rank, world.size, timeout=terms.timeout)))
    except (RuntimeError, ValueError) as error:
        raise CommError(f"init_method={method!r}: {error}; use env://, tcp://HOST:PORT or file:///PATH") from error
    return store, world


def _meet_by_mpi(world: World, env: Mapping[str, str], terms: Terms) -> tuple[Store, World]:
    try:
        mpi = Mpi.connect(world)
    except (MissingExtra, CommError) as error:
        if world.local_size != world.size:
            raise
        # All ranks are on this host, so that there is nothing to ask; only the port cannot be chosen together.
        get_logger().warning("%s; as all ranks are on one host, they meet at port %d", error, terms.port)
        world = replace(world, master_addr=LOOPBACK)
        return open_store(world, terms.timeout, hosting=world.rank == 0), world
    hosted: list[TCPStore] = []

    def open_here(zero: World, hosts: tuple[str, ...]) -> tuple[str, int]:
        elsewhere = next((host for host in hosts if host != hosts[0]), None)
        address = LOOPBACK if elsewhere is None else _own_address(elsewhere, env)
        hosted.append(_host_anywhere(replace(zero, master_addr=address, master_port=terms.port), terms.timeout))
        return address, hosted[0].port

    world = mpi.agree(open_here, socket.gethostname())
    return hosted[0] if hosted else open_store(world, terms.timeout, hosting=False), world


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
    if isinstance(error, TimeoutError):
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


def place(world: World, terms: Terms) -> str:
    """The meeting place in words."""
    if terms.init_method not in (None, "env://"):
        return str(terms.init_method)
    return f"{world.master_addr}:{world.master_port}" if world.size > 1 else "this process"
