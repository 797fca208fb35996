"""The job as a frozen value: what runs where, with which variables. It travels to other hosts as one encoded word.

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
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from mizzen.errors import LaunchError
from mizzen.launcher.hosts import Host, Hosts
from mizzen.network import prove

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
