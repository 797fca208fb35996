"""Who this process is among the others, and over which network interface they should talk to each other.

`environment.World.detect` reads the variables of a launcher; here is what they leave open: which of them to believe,
where the ranks meet, and whether the addresses of this host will do. Nothing is sent, and nothing is written to the
environment. The rendezvous itself is the business of `rendezvous.py` and `join.py`.

[Note: why this only warns]
gloo and NCCL take the interface from GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in the C environment and from nowhere
else. `ProcessGroupGloo._Options` has a list of devices, but `init_process_group` and `new_group` build gloo without it:
a group given a device on `lo` while GLOO_SOCKET_IFNAME=eth0 listened on eth0, on torch 2.11 and on 2.13. A backend of
our own that passes the device is no longer called "gloo" and loses what torch does for that name (monitored_barrier,
DeviceMesh, sequence numbers). This library writes no environment variable, so a launcher has to set them for the ranks;
here a rank finds out what they ought to be, and says so where the default would not work.

[Note: what gloo does by itself]
It binds to the address of this host's own name, and to loopback if that fails. Many hosts resolve their own name to
127.0.0.1 or 127.0.1.1 (Debian writes it into /etc/hosts), and then ranks on other hosts cannot connect.
"""

import importlib
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import psutil

from mizzen.environment import Switches, World, integer
from mizzen.errors import CommError, MissingExtra, MizzenError
from mizzen.network import is_loopback, resolve

LOOPBACK: Final = "127.0.0.1"
LAUNCHERS: Final = {
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "slurm": "Slurm",
    "azureml": "AzureML",
    "sagemaker": "SageMaker",
}
MPI_SOURCES: Final = ("openmpi", "mpich", "sagemaker")
"""Launchers that start ranks through MPI and do not say where they meet."""


def find_world(env: Mapping[str, str], *, rank: int = -1, size: int = -1, launchers: bool = True) -> World:
    """This process among the others; the meeting place may still be open. `launchers` are those beside torchrun."""
    found = World.detect(env)
    if rank >= 0 or size >= 0:
        return _from_arguments(found, env, rank, size)
    if found.source == "none":
        _refuse_half_a_world(env)
    if found.source in LAUNCHERS and not launchers and found.size > 1:
        raise CommError(
            f"{LAUNCHERS[found.source]} says that this is rank {found.rank} of {found.size}, but auto_mpi_discovery is "
            "off and RANK and WORLD_SIZE are not set: turn it on, or pass rank and world_size"
        )
    if not 0 <= found.rank < found.size:
        raise CommError(
            f"this is rank {found.rank} of {found.size}: ranks are 0 to {found.size - 1}; check the launcher"
        )
    return found


def with_store_address(world: World, env: Mapping[str, str], port: int) -> World:
    """Fill in what can be known without asking anybody; the address stays open where only MPI can tell it."""
    address = world.master_addr
    if address is None and world.source == "sagemaker":
        address = _sagemaker_master(env)
    if address is None and world.source == "torchrun" and world.size > 1:
        raise CommError(
            f"RANK={world.rank} and WORLD_SIZE={world.size} are set, but not MASTER_ADDR: set it to the host of rank 0"
        )
    if address is None and world.source == "arguments" and world.size > 1:
        raise CommError(
            f"rank={world.rank} and world_size={world.size} were passed, but nothing says where the ranks meet: "
            "set MASTER_ADDR, or pass init_method='tcp://HOST:PORT'"
        )
    return replace(world, master_addr=address, master_port=world.master_port or port)


def _from_arguments(found: World, env: Mapping[str, str], rank: int, size: int) -> World:
    if not 0 <= rank < size:
        raise CommError(f"rank={rank} and world_size={size} were passed: pass both, with rank from 0 to world_size - 1")
    if (found.rank, found.size) != (rank, size):
        # The variables, if there are any, speak of another world.
        local = integer(env, "LOCAL_RANK", 0)
        found = World(rank, size, local, integer(env, "LOCAL_WORLD_SIZE", 1), found.master_addr, found.master_port)
    return replace(
        found,
        master_addr=found.master_addr or env.get("MASTER_ADDR"),
        master_port=found.master_port or integer(env, "MASTER_PORT", 0) or None,
        source="arguments",
    )


def _refuse_half_a_world(env: Mapping[str, str]) -> None:
    """One of RANK and WORLD_SIZE without the other is a broken launcher, not a job of one rank."""
    rank, size = env.get("RANK"), env.get("WORLD_SIZE")
    if rank is not None and size is None:
        raise CommError(f"RANK={rank} is set, but not WORLD_SIZE: set both, or start with mizzen run or torchrun")
    if size is not None and rank is None and integer(env, "WORLD_SIZE", 1) > 1:
        raise CommError(f"WORLD_SIZE={size} is set, but not RANK: set both, or start with mizzen run or torchrun")


def _sagemaker_master(env: Mapping[str, str]) -> str | None:
    """The host that SageMaker itself calls the master; the first of the hosts where it names none."""
    try:
        hosts = json.loads(env.get("SM_HOSTS", "[]"))
        return json.loads(env["SM_TRAINING_ENV"]).get("master_hostname") or min(hosts, default=None)
    except (ValueError, AttributeError):
        return None


@dataclass(frozen=True, slots=True)
class Mpi:
    """The communicator that MPI gives to all processes of one `mpirun`."""

    communicator: Any
    world: World

    @classmethod
    def connect(cls, world: World) -> "Mpi":
        """Ask MPI who we are; the launcher's variables only say how many there should be."""
        try:
            library = importlib.import_module("mpi4py.MPI")
        except (ImportError, RuntimeError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "mpi4py":
                purpose = f"a job of {world.size} ranks started by mpirun"
                raise MissingExtra("mpi4py", extra="mpi", purpose=purpose) from error
            raise CommError(f"mpi4py is installed, but does not load: {error}; install it for your MPI") from error
        everyone = library.COMM_WORLD
        if everyone.Get_size() != world.size:
            vendor, _ = library.get_vendor()
            raise CommError(
                f"mpirun has started {world.size} ranks, but mpi4py, which is built for {vendor}, sees "
                f"{everyone.Get_size()}: the launcher belongs to another MPI. Install mpi4py for that one, or set "
                "MASTER_ADDR and MASTER_PORT"
            )
        host = everyone.Split_type(library.COMM_TYPE_SHARED)
        here = replace(
            world,
            rank=everyone.Get_rank(),
            size=everyone.Get_size(),
            local_rank=host.Get_rank(),
            local_size=host.Get_size(),
        )
        host.Free()
        return cls(everyone, here)

    def agree(self, open_here: Callable[[World, tuple[str, ...]], tuple[str, int]], host: str) -> World:
        """Let rank 0 open the meeting place, knowing everybody's host, and tell all; its failure is everybody's."""
        hosts = tuple(self.communicator.allgather(host))
        found: tuple[str, int] | MizzenError | None = None
        if self.world.rank == 0:
            try:
                found = open_here(self.world, hosts)
            except MizzenError as error:
                found = error
        found = self.communicator.bcast(found, root=0)
        if isinstance(found, MizzenError):
            raise found
        if found is None:
            raise AssertionError("rank 0 broadcast nothing")
        address, port = found
        return replace(self.world, master_addr=address, master_port=port)


DISCARD: Final = 9
"""A port to name in a connect that sends nothing."""
VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of this host, one of its addresses, and why it was chosen."""

    name: str
    address: str
    reason: str

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        return is_loopback(self.address)


def choose_interface(target: str | None, env: Mapping[str, str]) -> Interface | None:
    """The interface to talk over: the one that the user names, else the one that leads to `target`, else any."""
    named = ((variable, env.get(variable)) for variable in (*VARIABLES, "MIZZEN_INTERFACE"))
    for variable, value in named:
        if value and (found := _matching(value)):
            return Interface(*found, f"{variable}={value}")
    if target is not None and (source := address_towards(target)):
        return Interface(_holder(source) or "lo", source, f"it leads to {target}")
    for name, address in _addresses():
        if not is_loopback(address):
            return Interface(name, address, "it is the first that is not loopback")
    return None


def default_interface(env: Mapping[str, str]) -> Interface:
    """The interface that gloo will use in this process, whatever we think of it."""
    wanted = env.get("GLOO_SOCKET_IFNAME")
    if wanted and (found := _matching(wanted)):
        return Interface(*found, f"GLOO_SOCKET_IFNAME={wanted}")
    own = socket.gethostname()
    for address in _resolve(own):
        if holder := _holder(address):
            return Interface(holder, address, f"the host's own name, {own}, resolves to it")
    return Interface("lo", "127.0.0.1", f"the host's own name, {own}, resolves to no address of this host")


def interface_problem(target: str | None, env: Mapping[str, str]) -> str | None:
    """What is wrong with the interface of a rank whose job spans several hosts, and the way out; None if nothing is."""
    asked, used = Switches.read(env).interface, default_interface(env)
    known = {name for name, _ in _addresses()}
    if asked and not _matching(asked):
        return f"MIZZEN_INTERFACE={asked}: this host has only {', '.join(sorted(known))}"
    if asked and used.name != asked:
        return (
            f"MIZZEN_INTERFACE={asked}, but gloo will use {used.name} ({used.reason}): start with `mizzen run`, which "
            f"passes the choice on, or set {' and '.join(VARIABLES)} to {asked} for every rank"
        )
    # On the master's own host its name often leads to loopback, which says nothing about the way to the others.
    better = choose_interface(None if target is None or is_here(target) else target, env)
    if used.is_loopback and better is not None and not better.is_loopback:
        return (
            f"this job spans several hosts, but gloo will use {used.name} at {used.address} ({used.reason}), which "
            f"other hosts cannot reach: start with `mizzen run`, or set {' and '.join(VARIABLES)} to {better.name} for "
            "every rank"
        )
    return None


def address_towards(target: str) -> str | None:
    """The address of this host from which packets to `target` would leave; None if there is no way to it."""
    for family, address in resolve(target):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, DISCARD))  # a datagram socket only looks up the route
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def is_here(host: str) -> bool:
    """Whether a host name or address is this host."""
    return any(is_loopback(address) or _holder(address) for address in _resolve(host))


def _addresses() -> list[tuple[str, str]]:
    """Name and address of every interface that is up, IPv4 before IPv6."""
    states = psutil.net_if_stats()
    rows = [
        (family, name, entry.address.partition("%")[0])
        for name, entries in psutil.net_if_addrs().items()
        if name not in states or states[name].isup
        for entry in entries
        if (family := entry.family) in (socket.AF_INET, socket.AF_INET6)
    ]
    rows.sort(key=lambda row: row[0] != socket.AF_INET)
    return [(name, address) for _, name, address in rows]


def _matching(wanted: str) -> tuple[str, str] | None:
    """The first interface that a variable names. NCCL reads `eth` as a prefix, `=eth0` exactly, `^docker` as a not."""
    excluded, rest = wanted.startswith("^"), wanted.removeprefix("^")
    exact = rest.startswith("=")
    names = [name.strip().partition(":")[0] for name in rest.removeprefix("=").split(",")]

    def fits(name: str) -> bool:
        return name in names or (not exact and name.startswith(tuple(names)))

    rows = sorted(_addresses(), key=lambda row: row[0] not in names)
    return next((row for row in rows if fits(row[0]) != excluded), None)


def _holder(address: str) -> str | None:
    """The interface that has an address. All of 127/8 is loopback's, though only 127.0.0.1 is listed."""
    rows = _addresses()
    listed = next((name for name, own in rows if own == address.partition("%")[0]), None)
    if listed is None and is_loopback(address):
        return next((name for name, own in rows if is_loopback(own)), None)
    return listed


def _resolve(host: str) -> list[str]:
    return [address for _, address in resolve(host)]
