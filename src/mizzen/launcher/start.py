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
from typing import IO, Final, NoReturn
from uuid import uuid4

import psutil

from mizzen.errors import LaunchError, UsageError
from mizzen.launcher.backends import (
    MODULE,
    LaunchBackend,
    Pdsh,
    RemoteCommand,
    RemoteOptions,
    copy_line,
    remove_line,
    split_words,
    ssh,
)
from mizzen.launcher.hosts import Host, Hosts, count_devices, find_devices
from mizzen.launcher.job import ENDED, SAID, TAKEN, common_secret, file_paths
from mizzen.launcher.launch import HOSTFILE, LaunchOptions, LaunchPlan, LocalMachine, with_next_port
from mizzen.launcher.output import PipeReader, ProcessOutput, say, write
from mizzen.launcher.signals import HANDLED, UNSAVED, block_signals, is_handled
from mizzen.launcher.workers import dies_with_parent
from mizzen.network import fresh_key, resolve
from mizzen.wording import and_more

OTHERS: Final = 15.0
"""Seconds that the other hosts get to end by themselves after the first has failed."""
ATTEMPTS: Final = 5
"""Rendezvous ports that are tried."""
UNREACHABLE: Final = 255
"""What ssh itself exits with."""
TICK: Final = 0.05


def inspect_machine(options: LaunchOptions, env: Mapping[str, str]) -> LocalMachine:
    """Everything that a launch depends on and that is not in the command line."""
    here, home = current_folder(), Path(env.get("HOME") or "~").expanduser()
    hostfile = read_hostfile(Path(options.hostfile or HOSTFILE))
    if hostfile is None and options.hostfile is not None and not options.quiet:
        say(f"warning: --hostfile {options.hostfile}: there is no such file; going on without one")
    return LocalMachine(
        id=uuid4().hex[:12],
        folder=str(here),
        python=sys.executable,
        env=env,
        hostfile=hostfile,
        files=read_variables(env, home, here),
        devices=find_devices(env),
        count=lambda: count_devices(env),
        is_here=is_here,
        address=lambda name: address_of(name, options),
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


def address_of(name: str, options: LaunchOptions) -> str:
    """A host's address: its name where that resolves, else what ssh's own configuration calls it."""
    if resolve(name):
        return name
    remote = RemoteOptions(arguments=split_words(options.launcher_args) if options.launcher.lower() == "ssh" else ())
    words = [*ssh(remote), "-G", name]
    with suppress(OSError):
        shown = subprocess.run(words, capture_output=True, text=True, check=False).stdout
        for line in shown.splitlines():
            key, _, value = line.partition(" ")
            if key == "hostname" and resolve(value):
                return value
    return name


def execute(launch: LaunchPlan, env: Mapping[str, str]) -> int:
    """Run the job to its end and give its exit code; a supervisor on this machine takes the place of this process."""
    if launch.backend is None:
        _become_supervisor(launch, env)
    program = find_program(launch.backend)
    if launch.checks_ssh:
        check_ssh(launch)
    for attempt in range(1, ATTEMPTS + 1):
        remote_job = RemoteJob(launch, program, env)
        code = remote_job.run()
        if not remote_job.has_heard(TAKEN) or launch.has_fixed_port or remote_job.received:
            break
        launch = with_next_port(launch, attempt)
        say(f"trying port {launch.job.master_port} instead")
    return code


def _become_supervisor(launch: LaunchPlan, env: Mapping[str, str]) -> NoReturn:
    job = replace(launch.job, supervision=replace(launch.job.supervision, pid_file=launch.pid_file))
    file = tempfile.TemporaryFile()  # noqa: SIM115 - it goes on to the program that takes our place
    file.write(job.encode().encode())
    file.flush()
    os.set_inheritable(file.fileno(), True)
    words = [job.python, "-u", "-m", MODULE, "--node", str(launch.node), f"@{file.fileno()}"]
    sys.stdout.flush()
    block_signals()
    os.execve(job.python, words, env)


def find_program(backend: LaunchBackend) -> str:
    """The path of a back end's program, or an error that names what to install."""
    found = [path for name in backend.requirements.programs if (path := shutil.which(name))]
    if not found:
        other = "start each node by itself with --no_ssh" if backend.name == "ssh" else "use --launcher ssh"
        raise LaunchError(
            f"--launcher {backend.name} needs {backend.requirements.programs[-1]}, which is not installed: install "
            f"{backend.requirements.package}, or {other}"
        )
    if not backend.requirements.version_word:
        return found[0]
    for path in found:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if backend.requirements.version_word in said.stdout + said.stderr:
            return path
    word, package = backend.requirements.version_word, backend.requirements.package
    raise LaunchError(
        f"--launcher {backend.name}: {found[-1]} belongs to another MPI (its --version does not say {word!r}): install "
        f"{package}, or name the launcher that you have"
    )


def _need_ssh(who: str) -> None:
    if shutil.which("ssh") is None:
        raise LaunchError(f"{who} needs ssh, which is not installed: install the Debian package openssh-client")


def check_ssh(launch: LaunchPlan) -> None:
    """Log in to every host once; who cannot be reached is named with the reason."""
    _need_ssh("the look at the hosts, which --no_ssh_check leaves out,")
    if bad := _on_all_hosts(launch, lambda host: "true"):
        raise LaunchError(f"{bad}. Set up key login, or pass --no_ssh_check if this back end needs no ssh")


def copy_job_to_hosts(launch: LaunchPlan) -> None:
    """Put the job into a file on every host, where its program can bring it there neither by input nor by variable."""
    _need_ssh("a job that pdsh starts")
    if bad := _on_all_hosts(launch, lambda host: copy_line(launch.job, host), launch.job.encode()):
        raise LaunchError(f"{bad}. The job is brought to each host by ssh: set up key login")


def _on_all_hosts(launch: LaunchPlan, line: Callable[[str], str], given: str = "") -> str:
    """Run a line on every host at the same time, with this as its input; where it has failed, and why, in words."""
    remote = replace(launch.remote, arguments=())

    def reach(host: Host) -> str:
        words = [*ssh(remote), "-o", "ConnectTimeout=10", host.login, line(host.name)]
        ended = subprocess.run(words, input=given, capture_output=True, text=True, check=False)
        return "" if ended.returncode == 0 else f"{host.login} ({ended.stderr.strip() or ended.returncode})"

    with ThreadPoolExecutor(max_workers=64) as pool:
        bad = list(filter(None, pool.map(reach, launch.job.hosts)))
    words = f"{len(bad)} of {len(launch.job.hosts)} hosts cannot be reached by ssh without a password"
    return f"{words}: {and_more(bad, separator='; ')}" if bad else ""


class InputWriter:
    """The input of a command: a thread writes to it, since a host that cannot be reached reads nothing."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=self._run, name="mizzen-input", daemon=True).start()

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
class RunningCommand:
    """One remote command that runs, with its input and its output."""

    command: RemoteCommand
    process: "subprocess.Popen[bytes]"
    output: ProcessOutput
    input: "InputWriter | None" = None
    """Its input, where that brings something."""
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
        return is_ssh and self.process.returncode == UNREACHABLE and not self.output.messages


@dataclass(slots=True)
class RemoteJob:
    """The commands of one launch, from start to end."""

    launch: LaunchPlan
    program: str
    env: Mapping[str, str]
    running: list[RunningCommand] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    def run(self) -> int:
        """Start all of them, wait, and give the exit code of the first that failed."""
        backend = self.launch.backend
        if backend is None:
            raise AssertionError("a launch on this machine has no remote commands")
        for number in filter(is_handled, HANDLED):
            signal.signal(number, lambda number, _: self.received.append(number))
        if self.launch.pid_file is not None:
            Path(self.launch.pid_file).write_text(str(os.getpid()))
        pipes = PipeReader()
        commands = backend.commands(self.launch.job, self.launch.remote)
        if any(command.handover == "file" for command in commands):
            copy_job_to_hosts(self.launch)
        for command in commands:
            self.running.append(self._start(command, pipes))
        pipes.start()
        first, ended = None, []
        try:
            first = self._wait()
            ended = [one for one in self.running if one.process.poll() is not None]
        finally:
            self._end()
            pipes.drain()
            self._remove_job_files()
            if self.launch.pid_file is not None:
                Path(self.launch.pid_file).unlink(missing_ok=True)
        for one in sorted(self.running, key=lambda one: one is first):
            self._pass_on(one)
        for one in ended:
            if one.is_lost:
                say(f"error: ssh to {one.command.hosts[0]} has failed (exit code 255): see what it said above")
        if first is None:
            return 0
        if self.received and not self.has_heard(ENDED):
            return UNSAVED  # it was asked to stop before any supervisor was there to be asked
        return 1 if first.is_lost else first.code

    def _remove_job_files(self) -> None:
        """Remove the files with the job where not every supervisor has come to read its own."""
        last_words = [word for one in self.running for word in one.output.messages if word in (ENDED, TAKEN)]
        is_copied = any(one.command.handover == "file" for one in self.running)
        if is_copied and len(last_words) < len(self.launch.job.hosts):
            _on_all_hosts(self.launch, lambda host: remove_line(self.launch.job, host))

    def has_heard(self, word: str) -> bool:
        """Whether a supervisor has said this as its last word."""
        return any(word in one.output.messages for one in self.running)

    def _pass_on(self, running: RunningCommand) -> None:
        """Print with what words its supervisors have left, after what the program itself had to say."""
        words = running.output.messages[running.passed_on :]
        running.passed_on += len(words)
        said = [word.removeprefix(SAID) for word in words if word.startswith(SAID)]
        write("err", "".join(f"{line}\n" for line in said).encode(errors="backslashreplace"))

    def _start(self, command: RemoteCommand, pipes: PipeReader) -> RunningCommand:
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
        writer = InputWriter(process.stdin) if process.stdin is not None else None
        if writer is not None and command.handover == "input":
            writer.say(self.launch.job.encode())
        output = ProcessOutput(is_shown=True, mark=self.launch.job.last_word().encode())
        pipes.add(process, output)
        return RunningCommand(command, process, output, writer)

    def _wait(self) -> RunningCommand | None:
        """The first that failed, when all have ended. The others get a little time; an elastic job needs only some."""
        first: RunningCommand | None = None
        deadline, told, cut = None, 0, False
        while any(one.process.poll() is None for one in self.running):
            time.sleep(TICK)
            if len(self.received) > told:
                told += 1
                self._tell("stop" if told == 1 and signal.SIGHUP not in self.received else "end")
            failed = [one for one in self.running if one.process.poll() not in (None, 0)]
            for one in failed if self.launch.job.is_elastic else ():
                self._pass_on(one)  # the others may go on for days
            first = first or next(iter(failed), None)
            alive = len(self.running) - len(failed)
            if failed and deadline is None and (len(self.running) == 1 or alive < self.launch.job.min_nodes):
                deadline = time.monotonic() + OTHERS
            if deadline is not None and time.monotonic() > deadline and not cut:
                cut = True
                self._tell("end")
                deadline = time.monotonic() + OTHERS
            elif cut and deadline is not None and time.monotonic() > deadline:
                return first
        if self.launch.job.is_elastic and any(one.process.returncode == 0 for one in self.running):
            return None
        return first or next((one for one in self.running if one.process.returncode), None)

    def _tell(self, request: str) -> None:
        """Bring a request to the supervisors, each back end in its own way."""
        for one in self.running:
            if one.process.poll() is not None:
                continue
            if one.command.channel == "ask":
                command = Pdsh().ask(self.launch.job, self.launch.remote, request)
                words, env = (self.program, *command.words[1:]), {**self.env, **command.environment}
                subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL)
            elif one.input is None:
                one.process.send_signal(signal.SIGTERM if request == "end" else signal.SIGUSR1)
            elif request == "end":
                one.input.close()
            else:
                one.input.say("stop")

    def _end(self) -> None:
        for one in self.running:
            if one.input is not None:
                one.input.close()
            if one.process.poll() is None:
                one.process.terminate()
                try:
                    one.process.wait(OTHERS)
                except subprocess.TimeoutExpired:
                    one.process.kill()


def run_everywhere(hosts: Hosts, line: str, remote: RemoteOptions) -> int:
    """Run a shell's line on every host at once, each line of output after the name of its host; the largest code."""
    _need_ssh("mizzen ssh")
    pipes, processes = PipeReader(), []
    width = max(len(host.name) for host in hosts)
    for host in hosts:
        words = (*ssh(remote), host.login, line)
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        output = ProcessOutput(prefix=f"{host.name:{width}}  ".encode(), is_shown=True)
        pipes.add(process, output)
        processes.append(process)
    pipes.start()
    codes = [process.wait() for process in processes]
    pipes.drain()
    return max(128 - code if code < 0 else code for code in codes)
