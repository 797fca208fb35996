"""The only reader of environment variables: who this process is among the others, and the `MIZZEN_*` switches.

Every function takes the environment as an argument, so that a test passes a dict. Nothing here writes to it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mizzen.errors import ConfigError

Source = Literal["arguments", "torchrun", "openmpi", "mpich", "slurm", "azureml", "sagemaker", "none"]


def environ() -> Mapping[str, str]:
    """The environment of this process."""
    return os.environ


def integer(env: Mapping[str, str], name: str, default: int) -> int:
    """A whole number from the environment; anything else there is an error that names the variable."""
    text = env.get(name)
    if text is None or not text.strip():
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(name, f"the environment variable holds {text!r}, which is not a whole number") from None


def ranks_key(env: Mapping[str, str]) -> bytes:
    """With what the ranks of a job sign what they tell each other; `mizzen run` gives it to them."""
    return env.get("MIZZEN_KEY", "").encode()


@dataclass(frozen=True, slots=True)
class World:
    """This process among the others."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    source: Source = "none"

    @classmethod
    def detect(cls, env: Mapping[str, str]) -> "World":
        """Read the variables of torchrun, AzureML, SageMaker, Open MPI, MPICH or Slurm, in that order."""
        env = _trusted(env)
        for present, reader in _READERS:
            if all(name in env for name in present):
                return reader(env)
        return cls()


def _trusted(env: Mapping[str, str]) -> Mapping[str, str]:
    """The environment without those variables of Slurm that would mislead.

    [Note: variables that Slurm leaves behind]
    A batch script sees SLURM_PROCID=0 and SLURM_NTASKS=n although it is one process: only `srun` makes ranks, and only
    `srun` sets SLURM_STEP_ID. And `srun --mpi=pmi2` sets PMI_RANK like MPICH's own launcher, but no local rank, which
    would put every rank of a host on device 0; there Slurm's variables are the full account.
    """
    if "SLURM_PROCID" not in env:
        return env
    by_srun = "SLURM_STEP_ID" in env or "SLURM_STEPID" in env
    by_hydra = "MPI_LOCALRANKID" in env or "PALS_LOCAL_RANKID" in env
    hidden = ("PMI_RANK",) if by_srun and not by_hydra else () if by_srun else ("SLURM_PROCID",)
    return {name: value for name, value in env.items() if name not in hidden}


def _master(env: Mapping[str, str]) -> tuple[str | None, int | None]:
    port = integer(env, "MASTER_PORT", 0)
    return env.get("MASTER_ADDR"), port or None


def _from_torchrun(env: Mapping[str, str]) -> World:
    address, port = _master(env)
    local = integer(env, "LOCAL_WORLD_SIZE", integer(env, "LOCAL_SIZE", 1))
    return World(
        rank=integer(env, "RANK", 0),
        size=integer(env, "WORLD_SIZE", 1),
        local_rank=integer(env, "LOCAL_RANK", 0),
        local_size=local,
        master_addr=address,
        master_port=port,
        source="torchrun",
    )


def _from_openmpi(env: Mapping[str, str], source: Source = "openmpi") -> World:
    address, port = _master(env)
    return World(
        rank=integer(env, "OMPI_COMM_WORLD_RANK", 0),
        size=integer(env, "OMPI_COMM_WORLD_SIZE", 1),
        local_rank=integer(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        local_size=integer(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1),
        master_addr=address,
        master_port=port,
        source=source,
    )


def _from_azureml(env: Mapping[str, str]) -> World:
    world = _from_openmpi(env, "azureml")
    node = env.get("AZ_BATCH_MASTER_NODE")
    if node:
        address, _, _ = node.partition(":")
        return _with_master(world, address, 6105)
    return _with_master(world, env.get("AZ_BATCHAI_MPI_MASTER_NODE"), 54965)


def _from_sagemaker(env: Mapping[str, str]) -> World:
    return _from_openmpi(env, "sagemaker")


def _from_mpich(env: Mapping[str, str]) -> World:
    address, port = _master(env)
    return World(
        rank=integer(env, "PMI_RANK", 0),
        size=integer(env, "PMI_SIZE", 1),
        local_rank=integer(env, "MPI_LOCALRANKID", integer(env, "PALS_LOCAL_RANKID", 0)),
        local_size=integer(env, "MPI_LOCALNRANKS", 1),
        master_addr=address,
        master_port=port,
        source="mpich",
    )


def _from_slurm(env: Mapping[str, str]) -> World:
    address, port = _master(env)
    return World(
        rank=integer(env, "SLURM_PROCID", 0),
        size=integer(env, "SLURM_NTASKS", 1),
        local_rank=integer(env, "SLURM_LOCALID", 0),
        local_size=_tasks_here(env),
        master_addr=address or _first_slurm_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")),
        master_port=port,
        source="slurm",
    )


def _tasks_here(env: Mapping[str, str]) -> int:
    """The first count of `4(x2),3`: Slurm's way to write how many tasks each node runs."""
    counts = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "1"
    nodes: list[int] = []
    for part in counts.split(","):
        count, _, repeat = part.partition("(x")
        nodes += [int(count)] * (int(repeat.rstrip(")")) if repeat else 1)
    return nodes[min(integer(env, "SLURM_NODEID", 0), len(nodes) - 1)]


def _first_slurm_host(nodes: str | None) -> str | None:
    """The first host of `gpu[03-05,9],login1`."""
    if not nodes:
        return None
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    inside, _, tail = rest.partition("]")
    return head + inside.split(",")[0].split("-")[0] + tail.split(",")[0]


def _with_master(world: World, address: str | None, port: int) -> World:
    return World(world.rank, world.size, world.local_rank, world.local_size, address, port, world.source)


_READERS = (
    (("RANK", "WORLD_SIZE"), _from_torchrun),
    (("AZUREML_EXPERIMENT_ID", "OMPI_COMM_WORLD_RANK"), _from_azureml),
    (("SM_TRAINING_ENV", "OMPI_COMM_WORLD_RANK"), _from_sagemaker),
    (("OMPI_COMM_WORLD_RANK",), _from_openmpi),
    (("PMI_RANK",), _from_mpich),
    (("SLURM_PROCID", "SLURM_NTASKS"), _from_slurm),
)


@dataclass(frozen=True, slots=True)
class Switches:
    """What a user may set for a whole process. A `DEEPSPEED_*` or `DS_*` name is read where users already have it."""

    accelerator: str | None = None
    """MIZZEN_ACCELERATOR or DS_ACCELERATOR: cuda, cpu, mps, xpu, or a registered name."""
    timeout_minutes: float | None = None
    """MIZZEN_TIMEOUT or DEEPSPEED_TIMEOUT: how long a collective may take, in minutes."""
    interface: str | None = None
    """MIZZEN_INTERFACE: the network interface to use on hosts with several."""
    local_size: int | None = None
    """LOCAL_SIZE: ranks on this host; on a CPU it is the number of devices."""

    progress: str | None = None
    """MIZZEN_PROGRESS: the folder where each rank of this host keeps its progress record; set by the launcher."""

    @classmethod
    def read(cls, env: Mapping[str, str]) -> "Switches":
        """Take the switches from an environment."""
        name = "MIZZEN_TIMEOUT" if env.get("MIZZEN_TIMEOUT") else "DEEPSPEED_TIMEOUT"
        text = env.get(name)
        try:
            minutes = float(text) if text else None
        except ValueError:
            minutes = -1.0
        if minutes is not None and not 0 < minutes < float("inf"):
            raise ConfigError(
                name, f"the environment variable holds {text!r}, which is not a number of minutes above 0"
            )
        return cls(
            accelerator=env.get("MIZZEN_ACCELERATOR") or env.get("DS_ACCELERATOR"),
            timeout_minutes=minutes,
            interface=env.get("MIZZEN_INTERFACE"),
            local_size=integer(env, "LOCAL_SIZE", 0) or None,
            progress=env.get("MIZZEN_PROGRESS") or None,
        )
