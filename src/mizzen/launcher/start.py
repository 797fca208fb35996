"""Doing what was decided: look at this machine, run the commands of a launch, pass signals on, give its exit code."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import IO, Final, NoReturn
from uuid import uuid4

import psutil

from mizzen.errors import LaunchError, UsageError
from mizzen.launcher.arrange import HOSTFILE, Asked, Facts, Launch, again
from mizzen.launcher.backends import MODULE, Backend, Command, Pdsh, Way, brought, split_words, ssh, taken_back
from mizzen.launcher.devices import count_devices, find_devices
from mizzen.launcher.hosts import Host, Hosts
from mizzen.launcher.job import ENDED, SAID, TAKEN
from mizzen.launcher.keeper import dies_with_parent
from mizzen.launcher.output import Outlet, Pump, say, write
from mizzen.launcher.secret import common_secret
from mizzen.launcher.stops import HEEDED, UNSAVED, hold, is_heeded
from mizzen.launcher.variables import file_paths
from mizzen.network import fresh_key, resolve

OTHERS: Final = 15.0
"""Seconds that the other hosts get to end by themselves after the first has failed."""
ATTEMPTS: Final = 5
"""Meeting ports that are tried."""
UNREACHABLE: Final = 255
"""What ssh itself exits with."""
TICK: Final = 0.05


def gather(asked: Asked, env: Mapping[str, str]) -> Facts:
    """Everything that a launch depends on and that is not in the command line."""
    here, home = current_folder(), Path(env.get("HOME") or "~").expanduser()
    hostfile = read_hostfile(Path(asked.hostfile or HOSTFILE))
    if hostfile is None and asked.hostfile is not None and not asked.quiet:
        say(f"warning: --hostfile {asked.hostfile}: there is no such file; going on without one")
    return Facts(
        id=uuid4().hex[:12],
        folder=str(here),
        python=sys.executable,
        env=env,
        hostfile=hostfile,
        files=read_variables(env, home, here),
        devices=find_devices(env),
        count=lambda: count_devices(env),
        is_here=is_here,
        address=lambda name: address_of(name, asked),
        is_root=os.getuid() == 0,
        pid_file=str(Path(tempfile.gettempdir()) / f"{os.getpid()}.mizzen"),
        secret=fresh_key(),
        common_secret=lambda given: common_secret(given, home),
    )


def current_folder() -> Path:
    """Where this command was typed, which is where ranks run."""
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise UsageError("the current folder has been removed, and ranks would run there: go to another one") from error


def read_variables(env: Mapping[str, str], home: Path, here: Path) -> tuple[tuple[str, str], ...]:
    """Path and content of each environment file. One that DS_ENV_FILE names must be there."""
    paths = list(file_paths(env, home, here))
    try:
        # As bytes: a carriage return inside of a value is no end of a line.
        found = tuple((str(path), os.fsdecode(path.read_bytes())) for path in paths if path.is_file())
    except OSError as error:
        raise UsageError(f"{error.filename}: this environment file cannot be read ({error.strerror})") from error
    if not found and env.get("DS_ENV_FILE"):
        looked = " or ".join(map(str, paths))
        raise UsageError(f"DS_ENV_FILE={env['DS_ENV_FILE']}: there is no file {looked}: make it, or unset the variable")
    return found


def read_hostfile(path: Path) -> str | None:
    """What the file holds; None where there is none."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hostfile {path}: it cannot be read ({error})") from error


def is_here(name: str) -> bool:
    """Whether a name means this machine."""
    if name in (socket.gethostname(), "127.0.0.1"):
        return True
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return bool(own & {address for _, address in resolve(name)})


def address_of(name: str, asked: Asked) -> str:
    """A host's address: its name where that resolves, else what ssh's own configuration calls it."""
    if resolve(name):
        return name
    words = [*ssh(_way_of(asked)), "-G", name]
    with suppress(OSError):
        shown = subprocess.run(words, capture_output=True, text=True, check=False).stdout
        for line in shown.splitlines():
            key, _, value = line.partition(" ")
            if key == "hostname" and resolve(value):
                return value
    return name


def _way_of(asked: Asked) -> Way:
    return Way(arguments=split_words(asked.launcher_args) if asked.launcher.lower() == "ssh" else ())


def execute(launch: Launch, env: Mapping[str, str]) -> int:
    """Run the job to its end and give its exit code; a supervisor on this machine takes the place of this process."""
    if launch.backend is None:
        _become_supervisor(launch, env)
    program = find_program(launch.backend)
    if launch.checks_ssh:
        check_ssh(launch)
    for attempt in range(1, ATTEMPTS + 1):
        fleet = Fleet(launch, program, env)
        code = fleet.run()
        if not fleet.has_heard(TAKEN) or launch.has_fixed_port or fleet.received:
            break
        launch = again(launch, attempt)
        say(f"trying port {launch.job.master_port} instead")
    return code


def _become_supervisor(launch: Launch, env: Mapping[str, str]) -> NoReturn:
    job = replace(launch.job, care=replace(launch.job.care, pid_file=launch.pid_file))
    file = tempfile.TemporaryFile()  # noqa: SIM115 - it goes on to the program that takes our place
    file.write(job.encode().encode())
    file.flush()
    os.set_inheritable(file.fileno(), True)
    words = [job.python, "-u", "-m", MODULE, "--node", str(launch.node), f"@{file.fileno()}"]
    sys.stdout.flush()
    hold()
    os.execve(job.python, words, env)


def find_program(backend: Backend) -> str:
    """The path of a back end's program, or an error that names what to install."""
    found = [path for name in backend.needs.programs if (path := shutil.which(name))]
    if not found:
        other = "start each node by itself with --no_ssh" if backend.name == "ssh" else "use --launcher ssh"
        raise LaunchError(
            f"--launcher {backend.name} needs {backend.needs.programs[-1]}, which is not installed: install "
            f"{backend.needs.package}, or {other}"
        )
    if not backend.needs.sign:
        return found[0]
    for path in found:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if backend.needs.sign in said.stdout + said.stderr:
            return path
    raise LaunchError(
        f"--launcher {backend.name}: {found[-1]} belongs to another MPI (its --version does not say "
        f"{backend.needs.sign!r}): install {backend.needs.package}, or name the launcher that you have"
    )


def _need_ssh(who: str) -> None:
    if shutil.which("ssh") is None:
        raise LaunchError(f"{who} needs ssh, which is not installed: install the Debian package openssh-client")


def check_ssh(launch: Launch) -> None:
    """Log in to every host once; who cannot be reached is named with the reason."""
    _need_ssh("the look at the hosts, which --no_ssh_check leaves out,")
    if bad := _on_all_hosts(launch, lambda host: "true"):
        raise LaunchError(f"{bad}. Set up key login, or pass --no_ssh_check if this back end needs no ssh")


def bring_job(launch: Launch) -> None:
    """Put the job into a file on every host, where its program can bring it there neither by input nor by variable."""
    _need_ssh("a job that pdsh starts")
    if bad := _on_all_hosts(launch, lambda host: brought(launch.job, host), launch.job.encode()):
        raise LaunchError(f"{bad}. The job is brought to each host by ssh: set up key login")


def _on_all_hosts(launch: Launch, line: Callable[[str], str], given: str = "") -> str:
    """Run a line on every host at the same time, with this as its input; where it has failed, and why, in words."""
    way = replace(launch.way, arguments=())

    def reach(host: Host) -> str:
        words = [*ssh(way), "-o", "ConnectTimeout=10", host.login, line(host.name)]
        ended = subprocess.run(words, input=given, capture_output=True, text=True, check=False)
        return "" if ended.returncode == 0 else f"{host.login} ({ended.stderr.strip() or ended.returncode})"

    with ThreadPoolExecutor(max_workers=64) as pool:
        bad = list(filter(None, pool.map(reach, launch.job.hosts)))
    words = f"{len(bad)} of {len(launch.job.hosts)} hosts cannot be reached by ssh without a password"
    return f"{words}: {'; '.join(bad[:8])}" if bad else ""


class Line:
    """The input of a command: a thread writes to it, since a host that cannot be reached reads nothing."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=self._run, name="mizzen-line", daemon=True).start()

    def say(self, text: str) -> None:
        """Send a line, after those before it."""
        self._queue.put(f"{text}\n".encode())

    def close(self) -> None:
        """Send nothing more."""
        self._queue.put(None)

    def _run(self) -> None:
        with suppress(OSError):
            while (line := self._queue.get()) is not None:
                rest = memoryview(line)
                while rest:
                    rest = rest[self._pipe.write(rest) :]
        with suppress(OSError):
            self._pipe.close()


@dataclass(slots=True)
class Ship:
    """One command that runs."""

    command: Command
    process: "subprocess.Popen[bytes]"
    outlet: Outlet
    line: "Line | None" = None
    """The way to its input, where that brings something."""
    passed_on: int = 0
    """How much of what was heard has been dealt with."""

    @property
    def code(self) -> int:
        """Its exit code, as a shell gives it."""
        status = self.process.returncode
        return 128 - status if status < 0 else status

    @property
    def is_lost(self) -> bool:
        """Whether ssh itself has failed: a supervisor that leaves with its code says so before."""
        is_ssh = self.command.words[0] == "ssh"
        return is_ssh and self.process.returncode == UNREACHABLE and not self.outlet.heard


@dataclass(slots=True)
class Fleet:
    """The commands of one launch, from start to end."""

    launch: Launch
    program: str
    env: Mapping[str, str]
    ships: list[Ship] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    def run(self) -> int:
        """Start all of them, wait, and give the exit code of the first that failed."""
        backend = self.launch.backend
        if backend is None:
            raise AssertionError("a launch on this machine has no fleet")
        for number in filter(is_heeded, HEEDED):
            signal.signal(number, self._receive)
        if self.launch.pid_file is not None:
            Path(self.launch.pid_file).write_text(str(os.getpid()))
        pump = Pump()
        commands = backend.commands(self.launch.job, self.launch.way)
        if any(command.handover == "file" for command in commands):
            bring_job(self.launch)
        for command in commands:
            self.ships.append(self._start(command, pump))
        pump.start()
        first, ended = None, []
        try:
            first = self._wait()
            ended = [ship for ship in self.ships if ship.process.poll() is not None]
        finally:
            self._end()
            pump.finish(10.0)
            self._take_back()
            if self.launch.pid_file is not None:
                Path(self.launch.pid_file).unlink(missing_ok=True)
        for ship in sorted(self.ships, key=lambda ship: ship is first):
            self._pass_on(ship)
        for ship in ended:
            if ship.is_lost:
                say(f"error: ssh to {ship.command.hosts[0]} has failed (exit code 255): see what it said above")
        if first is None:
            return 0
        if self.received and not self.has_heard(ENDED):
            return UNSAVED  # it was asked to stop before any supervisor was there to be asked
        return 1 if first.is_lost else first.code

    def _take_back(self) -> None:
        """Remove the files with the job where not every supervisor has come to read its own."""
        last_words = [word for ship in self.ships for word in ship.outlet.heard if word in (ENDED, TAKEN)]
        is_brought = any(ship.command.handover == "file" for ship in self.ships)
        if is_brought and len(last_words) < len(self.launch.job.hosts):
            _on_all_hosts(self.launch, lambda host: taken_back(self.launch.job, host))

    def has_heard(self, word: str) -> bool:
        """Whether a supervisor has said this as its last word."""
        return any(word in ship.outlet.heard for ship in self.ships)

    def _pass_on(self, ship: Ship) -> None:
        """Print with what words its supervisors have left, after what the program itself had to say."""
        words = ship.outlet.heard[ship.passed_on :]
        ship.passed_on += len(words)
        said = [word.removeprefix(SAID) for word in words if word.startswith(SAID)]
        write("err", "".join(f"{line}\n" for line in said).encode(errors="backslashreplace"))

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)

    def _start(self, command: Command, pump: Pump) -> Ship:
        has_line = command.channel == "line"
        process = subprocess.Popen(
            (self.program, *command.words[1:]),
            env={**self.env, **command.environment},
            stdin=subprocess.PIPE if has_line else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGTERM),
        )
        line = Line(process.stdin) if process.stdin is not None else None
        if line is not None and command.handover == "input":
            line.say(self.launch.job.encode())
        outlet = Outlet(is_shown=True, mark=self.launch.job.last_word().encode())
        for pipe, stream in ((process.stdout, "out"), (process.stderr, "err")):
            if pipe is not None:
                pump.add(pipe, outlet, "out" if stream == "out" else "err")
        return Ship(command, process, outlet, line)

    def _wait(self) -> Ship | None:
        """The first that failed, when all have ended. The others get a little time; an elastic job needs only some."""
        first: Ship | None = None
        deadline, told, cut = None, 0, False
        while any(ship.process.poll() is None for ship in self.ships):
            time.sleep(TICK)
            if len(self.received) > told:
                told += 1
                self._tell("stop" if told == 1 and signal.SIGHUP not in self.received else "end")
            failed = [ship for ship in self.ships if ship.process.poll() not in (None, 0)]
            for ship in failed if self.launch.job.is_elastic else ():
                self._pass_on(ship)  # the others may go on for days
            first = first or next(iter(failed), None)
            alive = len(self.ships) - len(failed)
            if failed and deadline is None and (len(self.ships) == 1 or alive < self.launch.job.min_nodes):
                deadline = time.monotonic() + OTHERS
            if deadline is not None and time.monotonic() > deadline and not cut:
                cut = True
                self._tell("end")
                deadline = time.monotonic() + OTHERS
            elif cut and deadline is not None and time.monotonic() > deadline:
                return first
        if self.launch.job.is_elastic and any(ship.process.returncode == 0 for ship in self.ships):
            return None
        return first or next((ship for ship in self.ships if ship.process.returncode), None)

    def _tell(self, request: str) -> None:
        """Bring a request to the supervisors, each back end in its way."""
        for ship in self.ships:
            if ship.process.poll() is not None:
                continue
            if ship.command.channel == "ask":
                self._ask(request)
            elif ship.line is None:
                ship.process.send_signal(signal.SIGTERM if request == "end" else signal.SIGUSR1)
            elif request == "end":
                ship.line.close()
            else:
                ship.line.say("stop")

    def _ask(self, request: str) -> None:
        command = Pdsh().ask(self.launch.job, self.launch.way, request)
        subprocess.Popen(
            (self.program, *command.words[1:]), env={**self.env, **command.environment}, stdin=subprocess.DEVNULL
        )

    def _end(self) -> None:
        for ship in self.ships:
            if ship.line is not None:
                ship.line.close()
            if ship.process.poll() is None:
                ship.process.terminate()
                try:
                    ship.process.wait(OTHERS)
                except subprocess.TimeoutExpired:
                    ship.process.kill()


def run_everywhere(hosts: Hosts, line: str, way: Way) -> int:
    """Run a shell's line on every host at once, each line of output after the name of its host; the largest code."""
    _need_ssh("mizzen ssh")
    pump, processes = Pump(), []
    width = max(len(host.name) for host in hosts)
    for host in hosts:
        words = (*ssh(way), host.login, line)
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        outlet = Outlet(prefix=f"{host.name:{width}}  ".encode(), is_shown=True)
        for pipe, stream in ((process.stdout, "out"), (process.stderr, "err")):
            if pipe is not None:
                pump.add(pipe, outlet, "out" if stream == "out" else "err")
        processes.append(process)
    pump.start()
    codes = [process.wait() for process in processes]
    pump.finish()
    return max(128 - code if code < 0 else code for code in codes)
