"""What runs on each node: it finds its place, and hands over to the supervisor. `node.py` is its command."""

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
from mizzen.launcher.devices import ROOT, find_devices
from mizzen.launcher.family import SHARED
from mizzen.launcher.hosts import Host, in_allocation, is_number
from mizzen.launcher.job import ENDED, TAKEN, Job
from mizzen.launcher.keeper import Keeper
from mizzen.launcher.meeting import Seat, meet
from mizzen.launcher.output import open_standard_streams, say, write
from mizzen.launcher.store import PortTaken
from mizzen.launcher.supervisor import Signals, Supervisor
from mizzen.log import set_level


def main(words: Sequence[str] | None = None) -> int:
    """Run one node of a job, or bring a request to it; the exit code."""
    parser = argparse.ArgumentParser(prog="mizzen.launcher.node")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--node", type=int, help="which host of the job this is")
    place.add_argument("--host", help="the name of this host in the job")
    place.add_argument("--slurm", action="store_true", help="Slurm says which host this is")
    place.add_argument("--ask", choices=("stop", "end"), help="bring a request to the supervisor of the job here")
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
        job = Job.decode(find_word(given.job, env))
    except MizzenError as error:
        say(f"error: {error}")
        return 1
    code = serve(job, given, env)
    if job.is_followed:
        write("err", f"{job.last_word(TAKEN if code is None else ENDED)}\n".encode())
    return 1 if code is None else code


def find_word(place: str, env: Mapping[str, str]) -> str:
    """The encoded job, from where the launcher has left it."""
    if not place:
        return env.get("MIZZEN_JOB", "")
    if place == INPUT:
        return sys.stdin.readline().strip()
    if place.startswith("@"):
        with os.fdopen(int(place[1:]), "rb") as file:
            file.seek(0)
            return file.read().decode()
    return _take(place)


def _take(name: str) -> str:
    """What a file holds that the launcher has put here, and that nobody else can have; it is removed."""
    for folder in (SHARED, Path("/tmp")):
        with suppress(FileNotFoundError):
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb") as file:
                found = os.fstat(descriptor)
                if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
                    raise LaunchError(f"{folder / name} is not a file of this user's, so it is no job: somebody else's")
                os.unlink(folder / name)
                return file.read().decode().strip()
    raise LaunchError(f"the launcher has left no file {name} on this host")


def serve(job: Job, given: argparse.Namespace, env: Mapping[str, str]) -> int | None:
    """Run this node and say what went wrong; the exit code, or None where the meeting port is taken."""
    try:
        return run(*find_seat(job, given, env), env)
    except PortTaken as error:
        say(f"error: {error}", mark=job.mark)
        return None
    except MizzenError as error:
        say(f"error: {error}", mark=job.mark)
        return 1


def find_seat(job: Job, given: argparse.Namespace, env: Mapping[str, str]) -> tuple[Job, Seat]:
    """Which node this is; where only Slurm knows the hosts, the job gets their names here."""
    names = [host.name for host in job.hosts]
    if given.slurm:
        own, all_names = env.get("SLURMD_NODENAME", socket.gethostname()), in_allocation(env)
        index = names.index(own) if own in names else integer(env, "SLURM_NODEID", 0)
        if not names[index]:
            job = replace(job, master_addr=job.master_addr or all_names[0] if len(names) > 1 else job.master_addr)
        return job, Seat(index, Host(own, given_devices(job.hosts[index].slots, env)), job.master_addr)
    if given.host is not None:
        if given.host not in names:
            raise LaunchError(f"this host was called {given.host!r}, but the job knows {', '.join(names)}")
        return job, _seat(job, names.index(given.host), given.host)
    return job, _seat(job, given.node, names[min(given.node, len(names) - 1)])


def _seat(job: Job, index: int, name: str) -> Seat:
    slots = job.hosts[min(index, len(job.hosts) - 1)].slots
    return Seat(index, Host(name, slots), job.master_addr)


def given_devices(slots: tuple[int, ...], env: Mapping[str, str], root: Path = ROOT) -> tuple[int, ...]:
    """The devices behind slots: of those that Slurm has given to this node, where it says which."""
    kind = find_devices(env, root)
    given = env.get(kind.variable, "").split(",") if kind is not None else []
    is_known = max(slots) < len(given) and all(map(is_number, given))
    return tuple(int(given[slot]) for slot in slots) if is_known else slots


def run(job: Job, seat: Seat, env: Mapping[str, str]) -> int:
    """Supervise this node to the end of the job."""
    set_level(job.care.level)
    with Keeper() as keeper:
        signals = Signals()
        if job.lifeline:
            threading.Thread(target=follow, name="mizzen-lifeline", daemon=True).start()
        folder = job_folder(job, seat, keeper)
        if job.care.pid_file is not None:
            keeper.remove(Path(job.care.pid_file))
            Path(job.care.pid_file).write_text(str(os.getpid()))
        meeting = meet(job, seat, {**env, **job.environment})
        supervisor = Supervisor(job, seat, meeting, keeper=keeper, signals=signals, folder=folder, env=env)
        try:
            return supervisor.run()
        except LaunchError as error:
            meeting.leave(str(error))
            raise


def job_folder(job: Job, seat: Seat, keeper: Keeper) -> Path:
    """A folder of our own, in memory where there is room, whose name tells another process how to find us."""
    failed = ""
    for base in (SHARED, None):
        try:
            folder = Path(tempfile.mkdtemp(prefix=_prefix(job.id), suffix=f"-{seat.index}", dir=base))
            keeper.remove(folder)
            (folder / "pid").write_text(str(os.getpid()))
            return folder
        except OSError as error:
            failed += f"; {error}"
    raise LaunchError(f"no folder for the records of the ranks can be made{failed}: free some space, or set TMPDIR")


def _prefix(job: str) -> str:
    return f"mizzen-{job}-{socket.gethostname()}-"


def follow() -> None:
    """Do what the launcher says on standard input; when it is gone, end at once."""
    for line in sys.stdin:
        if line.strip() == "stop":
            os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGHUP)


def ask(job: str, request: str) -> int:
    """Bring a request to the supervisor of a job on this host."""
    number = signal.SIGUSR1 if request == "stop" else signal.SIGHUP
    for base in (SHARED, Path(tempfile.gettempdir())):
        for path in base.glob(f"{_prefix(job)}*/pid"):
            if path.stat().st_uid == os.getuid():  # others may write there, too
                os.kill(int(path.read_text()), number)
    return 0
