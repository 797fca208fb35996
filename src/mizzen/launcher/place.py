"""Where a node stands among the others, and what its ranks are told about it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mizzen.launcher.devices import Devices
from mizzen.launcher.hosts import Host
from mizzen.launcher.job import Job

LEFT_BY_LAUNCHERS: Final = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL", "PALS_", "MIZZEN_JOB", "MIZZEN_SECRET")
"""Variables that describe the supervisor, as mpirun started it; a rank that read them would take itself for another."""


@dataclass(frozen=True, slots=True)
class Place:
    """One node in one attempt."""

    node: int
    nodes: int
    first_rank: int
    world: int
    master_addr: str
    master_port: int
    attempt: int = 0
    """How many attempts the job has made before: one number for all nodes, also for one that has just come."""
    interface: str | None = None
    """What leads to the other nodes."""


@dataclass(frozen=True, slots=True)
class Member:
    """What a node says of itself when the nodes meet."""

    index: int
    slots: int
    host: str
    address: str


def settle(members: Sequence[Member], index: int) -> tuple[int, int, int]:
    """Node, first rank and world of a member: nodes are in the order of their indices, ranks follow one another."""
    order = sorted(members, key=lambda member: member.index)
    node = next(number for number, member in enumerate(order) if member.index == index)
    return node, sum(member.slots for member in order[:node]), sum(member.slots for member in order)


def rank_environment(
    job: Job, host: Host, place: Place, local_rank: int, *, folder: Path, devices: Devices | None, threads: int
) -> dict[str, str]:
    """What a rank finds in its environment beside what the supervisor has there."""
    variables = {
        "RANK": place.first_rank + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": place.world,
        "LOCAL_SIZE": len(host.slots),
        "LOCAL_WORLD_SIZE": len(host.slots),
        "CROSS_RANK": place.node,
        "CROSS_SIZE": place.nodes,
        "GROUP_RANK": place.node,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": place.master_port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": place.attempt,
        "TORCHELASTIC_MAX_RESTARTS": job.care.max_restarts,
        "TORCHELASTIC_RUN_ID": job.id,
        "MIZZEN_PROGRESS": folder,
        "MIZZEN_KEY": job.key(f"ranks of attempt {place.attempt}").hex(),
    }
    shown = {devices.variable: ",".join(map(str, host.slots))} if devices is not None else {}
    interface = {"GLOO_SOCKET_IFNAME": place.interface} if place.interface else {}
    own = {name: str(value) for name, value in variables.items()}
    return {"OMP_NUM_THREADS": str(threads), **interface, **job.environment, **shown, **own}


def inherited(env: Mapping[str, str]) -> dict[str, str]:
    """What a rank takes from its supervisor's environment.

    Unless that says otherwise, torch's C++ code writes errors only. For every connection that a rank which ends leaves
    behind it has a warning with a stack, and the sentence that says what happened would be lost among them.
    """
    kept = {name: value for name, value in env.items() if not name.startswith(LEFT_BY_LAUNCHERS)}
    return {"TORCH_CPP_LOG_LEVEL": "ERROR", **kept}
