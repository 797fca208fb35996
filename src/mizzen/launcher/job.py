"""The job as a frozen value: what runs where, with which variables. It travels to other hosts as one encoded word.

Behind it are the environment variables of a job and of its ranks, the files that add to them, and the secret of nodes
that are started by hand. The environment of this machine is an argument, and so is what the files hold; only
`common_secret` touches a file.

[Note: one word]
What a user types as an argument, and what a variable holds, must arrive byte for byte, and must never be read by a
shell, by pdsh (which replaces `%h`), by mpirun or by srun (which split at commas). So the whole job is encoded into
letters, digits, `-` and `_`.

Every user of a machine can read the arguments of every process, and the job holds values of environment files, and its
secret. So the word itself is never an argument: it goes by standard input, by an open or a private file, or by a
variable, which only its owner can read.
"""

import base64
import binascii
import json
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from mizzen.errors import LaunchError, UsageError
from mizzen.launcher.hosts import DeviceKind, Host, Hosts
from mizzen.launcher.rendezvous_state import Assignment
from mizzen.network import fresh_key, prove

Kind = Literal["script", "module", "executable"]

LONGEST: Final = 120_000
"""Letters that a variable can have: Linux allows 128 KiB."""
ENDED: Final = "ended"
TAKEN: Final = "port taken"
SAID: Final = "said:"
"""The last words of a supervisor: see `Job.last_word`. What follows `SAID` is a line for the launcher to print."""


@dataclass(frozen=True, slots=True)
class Program:
    """What every rank runs."""

    kind: Kind
    name: str
    arguments: tuple[str, ...] = ()
    takes_local_rank: bool = True

    def words(self, python: str, local_rank: int) -> list[str]:
        """The command of one rank."""
        start = {
            "script": [python, "-u", self.name],
            "module": [python, "-u", "-m", self.name],
            "executable": [self.name],
        }[self.kind]
        return [*start, *([f"--local_rank={local_rank}"] if self.takes_local_rank else []), *self.arguments]


@dataclass(frozen=True, slots=True)
class Supervision:
    """How a supervisor looks after its ranks."""

    max_restarts: int = 0
    grace: float = 120.0
    """Seconds that ranks get to save when they are asked to stop."""
    hang_timeout: float | None = None
    """Overrides what the configuration of the run says."""
    shown: tuple[int, ...] | None = (0,)
    """Ranks whose output goes to the terminal; None means all."""
    logs: str | None = None
    """The folder where each rank's output is kept."""
    level: str = "info"
    cores: tuple[int, ...] | None = None
    """Cores to share out among the ranks of a node; empty means all of them, None binds nothing."""
    pid_file: str | None = None
    """Where the supervisor notes its number, for as long as it runs."""


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that the supervisors of one launch have to know."""

    id: str
    program: Program
    hosts: Hosts
    folder: str
    python: str
    environment: Mapping[str, str] = field(default_factory=dict)
    master_addr: str = ""
    """Where the supervisors meet; empty on one machine, and where only Slurm knows the hosts."""
    master_port: int = 0
    min_nodes: int = 1
    max_nodes: int = 1
    supervision: Supervision = Supervision()
    secret: str = field(default="", repr=False)
    """What only the nodes of this job know: see docs/security.md."""
    drop_in: bool = False
    """Whether ranks find the drop-in; each host has its own copy of it."""
    follows_stdin: bool = False
    """Whether standard input ties a supervisor to the launcher: it brings requests, and its end is the end."""
    reports_to_launcher: bool = False
    """Whether a launcher reads what a supervisor writes, and so its last word: see `last_word`."""

    @property
    def mark(self) -> str:
        """What stands before each line with which a supervisor leaves; empty where it prints them itself.

        Programs such as mpirun have a word of their own on a job that failed, and ours is to be the last.
        """
        return self.last_word(SAID) if self.reports_to_launcher else ""

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change."""
        return self.min_nodes < self.max_nodes

    def last_word(self, word: str = "") -> str:
        """What a supervisor ends with, for the launcher alone: the exit code that it leaves with is its own.

        Without it nobody could tell a script's 255 from that of ssh, or its 98 from a rendezvous port that is taken.
        """
        return f"mizzen-{self.id}-last-word:{word}"

    def key(self, purpose: str) -> bytes:
        """What the nodes of this job sign with, different for each purpose."""
        if not self.secret:
            raise AssertionError("a job on several nodes has a secret")
        return prove(self.secret.encode(), self.id.encode(), purpose.encode())

    def encode(self) -> str:
        """The job as one word of letters, digits, `-` and `_`."""
        text = json.dumps(asdict(self), separators=(",", ":")).encode()
        return base64.urlsafe_b64encode(zlib.compress(text, 9)).decode().rstrip("=")

    def word(self) -> str:
        """The encoded job for a variable, where it must not be too long."""
        word = self.encode()
        if len(word) > LONGEST:
            raise LaunchError(
                f"the arguments and variables of this job take {len(word):,} letters when encoded, and the variable "
                f"in which this launcher brings them to other hosts holds {LONGEST:,}: put long arguments into a file "
                "that all hosts can read, or use --launcher ssh"
            )
        return word

    def file(self, host: str) -> str:
        """The name of the file in which a host finds the encoded job, where it can be brought there in no other way."""
        return f"mizzen-{self.id}-job-{host}"

    @classmethod
    def decode(cls, word: str) -> "Job":
        """The job that a word holds."""
        try:
            text = zlib.decompress(base64.urlsafe_b64decode(word + "=" * (-len(word) % 4)))
            return cls._from(json.loads(text))
        except (binascii.Error, zlib.error, ValueError, KeyError, TypeError) as error:
            raise LaunchError(
                f"this is no job ({error}): the hosts of a job must have the same version of mizzen"
            ) from error

    @classmethod
    def _from(cls, given: dict[str, Any]) -> "Job":
        program, supervision = given.pop("program"), given.pop("supervision")
        hosts = tuple(Host(host["name"], tuple(host["slots"]), host["user"]) for host in given.pop("hosts"))
        return cls(
            program=Program(**{**program, "arguments": tuple(program["arguments"])}),
            supervision=Supervision(
                **{**supervision, "shown": _tuple(supervision["shown"]), "cores": _tuple(supervision["cores"])}
            ),
            hosts=hosts,
            **given,
        )


def _tuple(value: list[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


PREFIXES: Final = ("NCCL", "PYTHON", "MLFLOW", "UCX", "MV2", "GLOO", "MIZZEN", "DS_ACCELERATOR", "TORCH_")
"""What a job on other machines takes along, beside what the accelerator names."""
OWN: Final = ("MIZZEN_PROGRESS", "MIZZEN_JOB", "MIZZEN_KEY", "MIZZEN_SECRET")
"""What one launch tells its own processes: it must not reach another job that is started inside."""
HERE: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Which devices of this machine are shown, which says nothing about those of another."""
PLAIN: Final = ("NCCL", "PYTHON", "UCX", "MV2", "GLOO", "MIZZEN", "DS_ACCELERATOR", "TORCH_", "CUDA_", "OMP_", "LD_")
"""Names whose values are settings, so that they may be printed. Any other may be a password."""
LEFT_BY_LAUNCHERS: Final = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL", "PALS_", "MIZZEN_JOB", "MIZZEN_SECRET")
"""Variables that describe the supervisor, as mpirun started it; a rank that read them would take itself for another."""
KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ENVIRONMENT_FILES: Final = (".deepspeed_env", ".mizzen_env")
SECRET_VARIABLE: Final = "MIZZEN_SECRET"
SECRET_FILE: Final = ".mizzen_secret"
SHORTEST_SECRET: Final = 16
"""Letters below which a secret can be guessed."""
DROP_IN: Final = Path(__file__).parents[1] / "drop_in"
"""Where the drop-in lies that this distribution carries as data: a package of another name, with its metadata."""


def exported(env: Mapping[str, str], prefixes: Iterable[str] = ()) -> dict[str, str]:
    """The variables of this machine that a job on other machines takes along, by their names."""
    wanted = (*PREFIXES, *prefixes)
    return {key: value for key, value in env.items() if key.startswith(wanted) and key not in (*OWN, *HERE)}


def is_plain(name: str) -> bool:
    """Whether the value of a variable may be shown to whoever looks at the screen, or at a file for a scheduler."""
    return name.startswith(PLAIN) and name not in OWN


def parse_file(text: str, path: str) -> dict[str, str]:
    """`KEY=VALUE` lines; blank lines and lines that start with `#` are skipped, and a value is taken as it stands."""
    found: dict[str, str] = {}
    for number, whole in enumerate(text.split("\n"), 1):
        line = whole.removesuffix("\r")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, equals, value = line.partition("=")
        key = key.strip().removeprefix("export ").strip()
        if not equals or not KEY.fullmatch(key):
            raise UsageError(f"{path}, line {number}: {line!r} is not KEY=VALUE")
        if "\0" in value:
            raise UsageError(f"{path}, line {number}: the value of {key} holds a zero byte, which no variable can")
        found[key] = value
    return found


def file_paths(env: Mapping[str, str], home: Path, here: Path) -> Iterator[Path]:
    """Where environment files may lie, in the order in which they are read: a later one wins."""
    other = env.get("DS_ENV_FILE")
    if other and ("/" in other or other.startswith("~")):
        yield Path(other.replace("~", str(home), 1) if other.startswith("~") else other)
        return
    for name in (other,) if other else ENVIRONMENT_FILES:
        yield home / name
        if here != home:
            yield here / name


def with_interface(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables by which gloo and NCCL learn of the interface that MIZZEN_INTERFACE names."""
    interface = variables.get("MIZZEN_INTERFACE")
    own = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
    return {**own, **variables}


def rank_environment(
    job: Job,
    host: Host,
    assignment: Assignment,
    local_rank: int,
    *,
    folder: Path,
    devices: DeviceKind | None,
    threads: int,
) -> dict[str, str]:
    """What a rank finds in its environment beside what the supervisor has there."""
    variables = {
        "RANK": assignment.first_rank + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": assignment.world,
        "LOCAL_SIZE": len(host.slots),
        "LOCAL_WORLD_SIZE": len(host.slots),
        "CROSS_RANK": assignment.node,
        "CROSS_SIZE": assignment.nodes,
        "GROUP_RANK": assignment.node,
        "MASTER_ADDR": assignment.master_addr,
        "MASTER_PORT": assignment.master_port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": assignment.attempt,
        "TORCHELASTIC_MAX_RESTARTS": job.supervision.max_restarts,
        "TORCHELASTIC_RUN_ID": job.id,
        "MIZZEN_PROGRESS": folder,
        "MIZZEN_KEY": job.key(f"ranks of attempt {assignment.attempt}").hex(),
    }
    shown = {devices.variable: ",".join(map(str, host.slots))} if devices is not None else {}
    interface = {"GLOO_SOCKET_IFNAME": assignment.interface} if assignment.interface else {}
    own = {name: str(value) for name, value in variables.items()}
    return {"OMP_NUM_THREADS": str(threads), **interface, **job.environment, **shown, **own}


def inherited(env: Mapping[str, str]) -> dict[str, str]:
    """What a rank takes from its supervisor's environment.

    Unless that says otherwise, torch's C++ code writes errors only. For every connection that a rank which ends leaves
    behind it has a warning with a stack, and the sentence that says what happened would be lost among them.
    """
    kept = {name: value for name, value in env.items() if not name.startswith(LEFT_BY_LAUNCHERS)}
    return {"TORCH_CPP_LOG_LEVEL": "ERROR", **kept}


def with_drop_in(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable by which a process finds the drop-in before whatever is installed."""
    before = environment.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(DROP_IN), before)))}


def common_secret(env: Mapping[str, str], home: Path) -> str:
    """What MIZZEN_SECRET holds, else the file in the home folder, which is made where there is none."""
    if SECRET_VARIABLE in env:
        return _checked_secret(env[SECRET_VARIABLE].strip(), SECRET_VARIABLE)
    path = home / SECRET_FILE
    try:
        if not path.exists():
            _make_secret_file(path)
        found = path.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise UsageError(
                f"{path} holds the secret of your jobs, and others can read or write it: chmod 600 it, or remove it "
                "and a new one is made"
            )
        return _checked_secret(path.read_text().strip(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: the secret by which nodes that are started one by one know each other cannot be kept there "
            f"({error}): set {SECRET_VARIABLE} to the same long random word on every node"
        ) from error


def _checked_secret(secret: str, where: str) -> str:
    if len(secret) < SHORTEST_SECRET:
        raise UsageError(
            f"{where} holds {len(secret)} letters, and a secret of a job has at least {SHORTEST_SECRET}: use a random "
            "one, as `openssl rand -hex 32` prints"
        )
    return secret


def _make_secret_file(path: Path) -> None:
    """Make the file whole or not at all: nodes that share a home may do this at the same moment."""
    descriptor, name = tempfile.mkstemp(prefix=f"{SECRET_FILE}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{fresh_key()}\n")
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)
