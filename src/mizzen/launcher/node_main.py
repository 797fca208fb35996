"""What runs on each node: it reads the job, finds out which node this is, and supervises. `node.py` is its command."""

import argparse
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mizzen.environment import environ, integer
from mizzen.errors import LaunchError, MizzenError
from mizzen.launcher.backends import INPUT
from mizzen.launcher.hosts import ROOT, Host, find_devices, in_allocation, is_number
from mizzen.launcher.job import ENDED, TAKEN, Job
from mizzen.launcher.output import open_standard_streams, say, write
from mizzen.launcher.rendezvous import Node, PortTaken, open_rendezvous
from mizzen.launcher.signals import StopSignals
from mizzen.launcher.supervisor import Supervisor
from mizzen.launcher.workers import SHARED_MEMORY, CleanupProcess
from mizzen.log import set_level
from mizzen.wording import and_more


def main(words: Sequence[str] | None = None) -> int:
    """Run one node of a job, or bring a request to it; the exit code."""
    parser = argparse.ArgumentParser(prog="mizzen.launcher.node")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--node", type=int, help="which host of the job this is")
    which.add_argument("--host", help="the name of this host in the job")
    which.add_argument("--slurm", action="store_true", help="Slurm says which host this is")
    which.add_argument("--ask", choices=("stop", "end"), help="bring a request to the supervisor of the job here")
    parser.add_argument(
        "job",
        nargs="?",
        default="",
        help="where the job is: @ and the number of an open file, - for standard input, the name of a file, nothing "
        "for MIZZEN_JOB; with --ask its name",
    )
    given = parser.parse_args(words)
    open_standard_streams()
    env = environ()
    if given.ask:
        return ask(given.job, given.ask)
    try:
        job = Job.decode(read_job(given.job, env))
    except MizzenError as error:
        say(f"error: {error}")
        return 1
    code = run_or_explain(job, given, env)
    if job.reports_to_launcher:
        write("err", f"{job.last_word(TAKEN if code is None else ENDED)}\n".encode())
    return 1 if code is None else code


def read_job(source: str, env: Mapping[str, str]) -> str:
    """The encoded job, from where the launcher has left it."""
    if not source:
        return env.get("MIZZEN_JOB", "")
    if source == INPUT:
        return sys.stdin.readline().strip()
    if source.startswith("@"):
        with os.fdopen(int(source[1:]), "rb") as file:
            file.seek(0)
            return file.read().decode()
    return _take_file(source)


def _take_file(name: str) -> str:
    """What a file holds that the launcher has put here, and that nobody else can have; it is removed."""
    for folder in (SHARED_MEMORY, Path("/tmp")):
        with suppress(FileNotFoundError):
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb") as file:
                found = os.fstat(descriptor)
                if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
                    raise LaunchError(f"{folder / name} is not a file of this user's, so it is no job: somebody else's")
                os.unlink(folder / name)
                return file.read().decode().strip()
    raise LaunchError(f"the launcher has left no file {name} on this host")


def run_or_explain(job: Job, given: argparse.Namespace, env: Mapping[str, str]) -> int | None:
    """Run this node and say what went wrong; the exit code, or None where the rendezvous port is taken."""
    try:
        return run(*find_node(job, given, env), env)
    except PortTaken as error:
        say(f"error: {error}", mark=job.mark)
        return None
    except MizzenError as error:
        say(f"error: {error}", mark=job.mark)
        return 1


def find_node(job: Job, given: argparse.Namespace, env: Mapping[str, str]) -> tuple[Job, Node]:
    """Which node this is; where only Slurm knows the hosts, the job gets their names here."""
    names = [host.name for host in job.hosts]
    if given.slurm:
        own, all_names = env.get("SLURMD_NODENAME", socket.gethostname()), in_allocation(env)
        index = names.index(own) if own in names else integer(env, "SLURM_NODEID", 0)
        if not names[index]:
            job = replace(job, master_addr=job.master_addr or all_names[0] if len(names) > 1 else job.master_addr)
        return job, Node(index, Host(own, given_devices(job.hosts[index].slots, env)), job.master_addr)
    if given.host is not None:
        if given.host not in names:
            raise LaunchError(f"this host was called {given.host!r}, but the job knows {and_more(names, 16)}")
        return job, _node(job, names.index(given.host), given.host)
    return job, _node(job, given.node, names[min(given.node, len(names) - 1)])


def _node(job: Job, index: int, name: str) -> Node:
    slots = job.hosts[min(index, len(job.hosts) - 1)].slots
    return Node(index, Host(name, slots), job.master_addr)


def given_devices(slots: tuple[int, ...], env: Mapping[str, str], root: Path = ROOT) -> tuple[int, ...]:
    """The devices behind slots: of those that Slurm has given to this node, where it says which."""
    kind = find_devices(env, root)
    given = env.get(kind.variable, "").split(",") if kind is not None else []
    is_known = max(slots) < len(given) and all(map(is_number, given))
    return tuple(int(given[slot]) for slot in slots) if is_known else slots


def run(job: Job, node: Node, env: Mapping[str, str]) -> int:
    """Supervise this node to the end of the job."""
    set_level(job.supervision.level)
    with CleanupProcess() as cleanup:
        signals = StopSignals()
        if job.follows_stdin:
            threading.Thread(target=follow_stdin, name="mizzen-stdin", daemon=True).start()
        folder = job_folder(job, node, cleanup)
        if job.supervision.pid_file is not None:
            cleanup.remove(Path(job.supervision.pid_file))
            Path(job.supervision.pid_file).write_text(str(os.getpid()))
        rendezvous = open_rendezvous(job, node, {**env, **job.environment})
        supervisor = Supervisor(job, node, rendezvous, cleanup=cleanup, signals=signals, folder=folder, env=env)
        try:
            return supervisor.run()
        except LaunchError as error:
            rendezvous.leave(str(error))
            raise


def job_folder(job: Job, node: Node, cleanup: CleanupProcess) -> Path:
    """A folder of our own, in memory where there is room, whose name tells another process how to find us."""
    failed = ""
    for base in (SHARED_MEMORY, None):
        try:
            folder = Path(tempfile.mkdtemp(prefix=_prefix(job.id), suffix=f"-{node.index}", dir=base))
            cleanup.remove(folder)
            (folder / "pid").write_text(str(os.getpid()))
            return folder
        except OSError as error:
            failed += f"; {error}"
    raise LaunchError(f"no folder for the records of the ranks can be made{failed}: free some space, or set TMPDIR")


def _prefix(job: str) -> str:
    return f"mizzen-{job}-{socket.gethostname()}-"


def follow_stdin() -> None:
    """Do what the launcher says on standard input; when it is gone, end at once."""
    for line in sys.stdin:
        if line.strip() == "stop":
            os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGHUP)


def ask(job: str, request: str) -> int:
    """Bring a request to the supervisor of a job on this host."""
    number = signal.SIGUSR1 if request == "stop" else signal.SIGHUP
    for base in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        for path in base.glob(f"{_prefix(job)}*/pid"):
            if path.stat().st_uid == os.getuid():  # others may write there, too
                os.kill(int(path.read_text()), number)
    return 0
