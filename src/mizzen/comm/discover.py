"""Who this process is among the others: from arguments, a launcher's variables, or MPI itself.

`environment.World.detect` reads the variables; here is what they leave open: which of them to believe, and where the
ranks meet. Nothing is written to the environment. The meeting itself is `join.py`'s business.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from mizzen.environment import World, integer
from mizzen.errors import CommError, MissingExtra, MizzenError

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
