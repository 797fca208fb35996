"""How a job is started on other hosts: one `LaunchBackend` per remote program, from a job to commands. Pure.

Whatever the program, it starts one process per host, the supervisor, and never sees a word of the user's own.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from mizzen.errors import UsageError
from mizzen.launcher.job import Job

Channel = Literal["line", "signal", "ask"]
Handover = Literal["input", "file", "variable"]
INPUT: Final = "-"
"""What stands for the job where its encoded word is the first line of standard input."""
MODULE: Final = "mizzen.launcher.node"
VARIABLE: Final = "MIZZEN_JOB"


@dataclass(frozen=True, slots=True)
class RemoteCommand:
    """One process on this machine, and the hosts that it reaches."""

    words: tuple[str, ...]
    hosts: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of this process."""
    channel: Channel = "signal"
    """How a request to stop gets through: a line on its input, a signal that it passes on, or a command of its own."""
    handover: Handover = "variable"
    """How the job gets there, which must not be an argument: see [Note: one word] in `job.py`."""


def split_words(text: str) -> tuple[str, ...]:
    """The words of `--launcher_args`, as a shell would split them."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--launcher_args {text!r}: {error}: close what is open, or put a \\ before it") from error


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """What the user says about how the hosts are reached."""

    arguments: tuple[str, ...] = ()
    """Words for the remote program itself."""
    ssh_port: int | None = None
    venv_script: str = ""
    is_root: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    """The environment of this process."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a back end needs to be installed here."""

    programs: tuple[str, ...]
    """Its names; the first that is found is used."""
    package: str
    """What to install where it is missing."""
    version_word: str = ""
    """A word that its `--version` prints; empty where its name says enough."""
    takes_users: bool = False
    """Whether it can log in as the user that a hostfile names for one host."""
    takes_ipv6: bool = False
    """Whether it takes an IPv6 address for a host's name."""


class LaunchBackend(Protocol):
    """A remote program. `start.py` looks for it, then runs its commands; `mizzen run --dry-run` prints them."""

    @property
    def name(self) -> str:
        """What `--launcher` calls this back end."""

    @property
    def requirements(self) -> Requirements:
        """What has to be installed for it."""

    def commands(self, job: Job, remote: RemoteOptions) -> tuple[RemoteCommand, ...]:
        """The commands that start a supervisor on every host."""


def supervisor(job: Job, remote: RemoteOptions, *flags: str, word: str = "") -> str:
    """The line that a remote shell reads: words of our own, and one that says where the job is."""
    python = "python" if remote.venv_script else job.python
    words = (python, "-u", "-m", MODULE, *flags, *([word] if word else []))
    line = f"exec {shlex.join(words)}"
    if remote.venv_script:
        line = f"exec sh -c {shlex.quote(f'. {shlex.quote(remote.venv_script)} && {line}')}"
    return line


class Ssh:
    """One ssh per host. Its input brings the job, then requests to the supervisor there: when it is cut, ranks end."""

    name = "ssh"
    requirements = Requirements(("ssh",), "the Debian package openssh-client", takes_users=True, takes_ipv6=True)

    def commands(self, job: Job, remote: RemoteOptions) -> tuple[RemoteCommand, ...]:
        """The commands that start a supervisor on every host."""
        return tuple(
            RemoteCommand(
                (*ssh(remote), host.login, supervisor(job, remote, "--node", str(node), word=INPUT)),
                (host.name,),
                channel="line",
                handover="input",
            )
            for node, host in enumerate(job.hosts)
        )


def ssh(remote: RemoteOptions) -> tuple[str, ...]:
    """ssh with what the user says, and without questions that nobody can answer."""
    port = ("-p", str(remote.ssh_port)) if remote.ssh_port else ()
    return ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", *port, *remote.arguments)


class Pdsh:
    """One pdsh for all hosts; a supervisor finds its place by the name that pdsh puts in for `%h`."""

    name = "pdsh"
    requirements = Requirements(("pdsh",), "the Debian package pdsh", takes_users=True)

    def commands(self, job: Job, remote: RemoteOptions) -> tuple[RemoteCommand, ...]:
        """The commands that start a supervisor on every host."""
        line = supervisor(job, remote, "--host", "HOST", word=job.file("HOST")).replace("%", "%%")
        line = line.replace("--host HOST", "--host %h", 1).replace(job.file("HOST"), job.file("%h"))
        words = (*self._start(job, remote), line)
        return (RemoteCommand(words, _names(job), self._environment(remote), channel="ask", handover="file"),)

    def ask(self, job: Job, remote: RemoteOptions, request: str) -> RemoteCommand:
        """The command that brings a request to the supervisors."""
        line = supervisor(job, remote, "--ask", request, word=job.id).replace("%", "%%")
        return RemoteCommand((*self._start(job, remote), line), _names(job), self._environment(remote))

    def _start(self, job: Job, remote: RemoteOptions) -> tuple[str, ...]:
        logins = ",".join(host.login for host in job.hosts)
        return ("pdsh", "-S", "-N", "-R", "ssh", "-f", "1024", "-w", logins, *remote.arguments)

    def _environment(self, remote: RemoteOptions) -> dict[str, str]:
        given = remote.environment.get("PDSH_SSH_ARGS_APPEND", "")
        port = f"-p {remote.ssh_port}" if remote.ssh_port else ""
        return {"PDSH_SSH_ARGS_APPEND": " ".join(filter(None, (given, "-o BatchMode=yes", port)))}


class OpenMpi:
    """One block of mpirun's command line per host, so that a supervisor knows its place whatever mpirun does."""

    name = "openmpi"
    requirements = Requirements(("mpirun.openmpi", "mpirun"), "the Debian package openmpi-bin", "Open MPI")

    def commands(self, job: Job, remote: RemoteOptions) -> tuple[RemoteCommand, ...]:
        """The commands that start a supervisor on every host."""
        port = ("--mca", "plm_rsh_args", f"-p {remote.ssh_port}") if remote.ssh_port else ()
        root = ("--allow-run-as-root",) if remote.is_root else ()
        words = ["mpirun", *root, "--bind-to", "none", *port, *remote.arguments]
        for node, host in enumerate(job.hosts):
            block = ("-np", "1", "--host", host.name, "-x", VARIABLE, *interpreter(job, remote), "--node", str(node))
            words += [*((":",) if node else ()), *block]
        return (RemoteCommand(tuple(words), _names(job), {VARIABLE: job.word()}),)


@dataclass(frozen=True, slots=True)
class Hydra:
    """MPICH and what was made from it share one launcher, hydra, and differ in names."""

    name: str
    requirements: Requirements
    ssh_arguments: str
    """The variable that holds more words for ssh."""

    def commands(self, job: Job, remote: RemoteOptions) -> tuple[RemoteCommand, ...]:
        """The commands that start a supervisor on every host."""
        port = {self.ssh_arguments: f"-p {remote.ssh_port}"} if remote.ssh_port else {}
        words = ["mpirun", "-launcher", "ssh", "-hosts", ",".join(_names(job)), "-ppn", "1", "-genvlist", VARIABLE]
        words += remote.arguments
        for node in range(len(job.hosts)):
            words += [*((":",) if node else ()), "-n", "1", *interpreter(job, remote), "--node", str(node)]
        return (RemoteCommand(tuple(words), _names(job), {VARIABLE: job.word(), **port}),)


class Slurm:
    """One srun for all hosts, inside an allocation or making its own; a supervisor is told its place by Slurm."""

    name = "slurm"
    requirements = Requirements(("srun",), "the Debian package slurm-client")

    def commands(self, job: Job, remote: RemoteOptions) -> tuple[RemoteCommand, ...]:
        """The commands that start a supervisor on every host."""
        count = len(job.hosts)
        names = (f"--nodelist={','.join(_names(job))}",) if job.hosts[0].name else ()
        words = (
            *("srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", *names),
            *("--kill-on-bad-exit=0", "--mpi=none", "--export=ALL", *remote.arguments),
            *interpreter(job, remote),
            "--slurm",
        )
        return (RemoteCommand(words, _names(job), {VARIABLE: job.word()}),)


def interpreter(job: Job, remote: RemoteOptions) -> tuple[str, ...]:
    """The supervisor without its place, for programs that need no shell to start it."""
    if remote.venv_script:
        line = f'. {shlex.quote(remote.venv_script)} && exec python -u -m {MODULE} "$@"'
        return ("sh", "-c", line, "mizzen")
    return (job.python, "-u", "-m", MODULE)


def _names(job: Job) -> tuple[str, ...]:
    return tuple(host.name for host in job.hosts)


INTEL: Final = "intel-oneapi-mpi (from Intel's own package archive; Debian has none), and source its setvars.sh"
MVAPICH: Final = "MVAPICH from its source at mvapich.cse.ohio-state.edu (Debian has no package)"
BACKENDS: Final[tuple[LaunchBackend, ...]] = (
    Ssh(),
    Pdsh(),
    OpenMpi(),
    Hydra(
        "mpich",
        Requirements(("mpirun.mpich", "mpirun"), "the Debian package mpich", "HYDRA"),
        "HYDRA_LAUNCHER_EXTRA_ARGS",
    ),
    Hydra("impi", Requirements(("mpirun",), INTEL, "Intel"), "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"),
    Hydra("mvapich", Requirements(("mpirun",), MVAPICH, "HYDRA"), "HYDRA_LAUNCHER_EXTRA_ARGS"),
    Slurm(),
)
NAMES: Final = tuple(backend.name for backend in BACKENDS)


def copy_line(job: Job, host: str) -> str:
    """The line that a remote shell reads to put its input into a file that is its user's alone."""
    script = f'umask 077; set -C; d=/dev/shm; [ -w $d ] || d=/tmp; cat > "$d/{job.file(host)}"'
    return f"exec sh -c {shlex.quote(script)}"


def remove_line(job: Job, host: str) -> str:
    """The line that removes that file again."""
    return shlex.join(("rm", "-f", *(f"{folder}/{job.file(host)}" for folder in ("/dev/shm", "/tmp"))))


def find_backend(name: str) -> LaunchBackend:
    """The back end of that name, in any case."""
    for backend in BACKENDS:
        if backend.name == name.lower():
            return backend
    raise UsageError(f"--launcher {name}: unknown; known: {', '.join(NAMES)}")
