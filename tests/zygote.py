"""The process that ranks and Python programs of tests are forked from. `pool.py` starts it and speaks to it.

It imports torch once and never runs an operation (a child forked after a backward hangs in its own backward), so a
fork of it is a fresh rank within milliseconds. Where several processes run tests, each has a fork of one that imported
all that. It forks the ranks of one job, watches them, and reports one `Outcome` per rank. A rank that is done keeps
still until all are done, so that nobody meets a closed connection because of another's success; a rank that fails
leaves at once, as in life. In the end every rank and what it started is killed.
Only Linux.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import importlib.metadata
import importlib.util
import io
import os
import reprlib
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Final, NoReturn

PRELOAD: Final = (
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",  # the first optimizer of a process imports it, and that takes more than a second
    "torch._inductor.compile_fx",  # and this the first that compiles, whatever the backend
    "torch.profiler._cupti_monitor",  # the first step of an optimizer, to be seen by profilers; torch 2.11 has none
    "safetensors.torch",
    "transformers.models.llama.modeling_llama",  # a second for every rank whose module has such a model
    "mizzen.accelerator.cpu",  # the four that the first question for an accelerator imports
    "mizzen.accelerator.cuda",
    "mizzen.accelerator.mps",
    "mizzen.accelerator.device",
    "mizzen.api",
    "mizzen.cli",
    "mizzen.cli.plan",
    "mizzen.zero",
)
"""What nearly every rank needs. Importing any of it runs no operation and starts no thread (test_pool looks)."""
DUMP: Final = signal.SIGUSR2
"""A rank that gets it writes the stacks of all its threads, also from inside C++ that holds the GIL."""
HUGE: Final = 2 << 20
MADV_COLLAPSE: Final = 25
LOOK: Final = 0.02
"""Seconds between two looks at the ranks; a message wakes us at once, a death within this time."""
SHORT: Final = reprlib.Repr()
SHORT.maxother = SHORT.maxstring = 200


@dataclass(frozen=True, slots=True)
class Job:
    """One function to be run on some ranks, with the surroundings of the process that asks."""

    size: int
    backend: str | None
    module: str
    path: str
    name: str
    arguments: bytes
    """Of one call, or with `is_each` of several that are made one after the other."""
    timeout: float
    grace: float
    environment: dict[str, str]
    search: list[str]
    folder: str
    is_each: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended. `error_type` is None when it returned `value`.

    Otherwise it is the name of the exception, of the signal that killed the rank ("SIGKILL"), "Exited" for a rank that
    left without a word, "Timeout" for one that was still running at the end of its time, or "Stopped" for one that was
    still running when the grace after another's failure was over; for the last two, `traceback` is where it was.
    """

    rank: int
    value: Any = None
    error_type: str | None = None
    traceback: str = ""
    signal: int | None = None
    output: str = ""
    seconds: float = 0.0


def pack(value: Any) -> bytes:
    """A value as bytes; tensors inside it stay tensors."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """What `pack` packed; only ever bytes that our own ranks made."""
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)


@dataclass(slots=True)
class Rank:
    """A forked rank, as its zygote sees it."""

    rank: int
    pid: int
    wire: Connection
    output: IO[bytes]
    stacks: IO[bytes]
    started: float = field(default_factory=time.monotonic)
    outcome: Outcome | None = None

    def look(self) -> None:
        """Take the rank's message, or notice that it has died without one."""
        # The order matters: what a rank has said counts, whatever became of it afterwards.
        dead = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        with suppress(EOFError, ConnectionResetError):
            if self.wire.poll():
                error_type, content = self.wire.recv()
                if error_type is None:
                    self.end(value=content)
                else:
                    self.end(error_type=error_type, traceback=content)
        if self.outcome is None and dead is not None:
            self._died(dead.si_code, dead.si_status)

    def _died(self, code: int, status: int) -> None:
        stacks = _text(self.stacks)
        if code == os.CLD_EXITED:
            self.end(error_type="Exited", traceback=f"left with status {status} and without a result\n{stacks}")
        else:
            name = signal.Signals(status).name
            self.end(error_type=name, traceback=f"killed by {name}\n{stacks}", signal=status)

    def interrupt(self, error_type: str) -> None:
        """Ask a running rank where it is, and record that as its end."""
        os.kill(self.pid, DUMP)
        patience = time.monotonic() + 5.0
        before, now = None, ""
        while time.monotonic() < patience and (not now or now != before):
            time.sleep(5 * LOOK)
            before, now = now, _text(self.stacks)
        self.end(error_type=error_type, traceback=now or "no stack: it takes no signals\n")

    def end(self, **fields: Any) -> None:
        """Record how the rank ended, with what it has printed."""
        seconds = time.monotonic() - self.started
        self.outcome = Outcome(rank=self.rank, output=_text(self.output), seconds=seconds, **fields)

    def bury(self) -> None:
        """Kill the rank with all it has started, and reap it; until then its process id is not given to others."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.wire.close()
        self.output.close()
        self.stacks.close()


def _text(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody is handed while this is held, and that a store may still listen on.

    Bound with SO_REUSEADDR and not listening, it does not stop a second such socket from taking the same port.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@dataclass(frozen=True, slots=True)
class Program:
    """What would follow `python` on a command line, with the surroundings of the process that asks."""

    words: tuple[str, ...]
    timeout: float
    environment: dict[str, str]
    folder: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended; `code` is None for one that was still running at the end of its time."""

    code: int | None
    out: str
    err: str


def run_program(program: Program, parent: Connection) -> Ended:
    """Fork, and be `python` with these words; what it has started is gone when this ends."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        zygote = os.getpid()
        pid = os.fork()
        if not pid:
            _die_with(zygote)
            os.setpgid(0, 0)
            parent.close()
            for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out.fileno(), 1), (err.fileno(), 2)):
                os.dup2(source, target)
            _be_program(program)
        deadline = time.monotonic() + program.timeout
        while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) and time.monotonic() < deadline:
            if parent.poll(LOOK):
                break  # nothing is asked while a program runs: this is the end of the pipe
        is_over = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return Ended(code if is_over else None, _text(out), _text(err))


def _be_program(program: Program) -> NoReturn:
    """What an interpreter does with the words of its command line, and at its end."""
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.folder)
    more = program.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in more if path and path not in sys.path]
    kind, *rest = program.words
    code: Any = 0
    try:
        if kind == "-c":
            sys.modules["__main__"] = ModuleType("__main__")
            sys.path.insert(0, "")
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
        elif kind == "-m":
            sys.path.insert(0, program.folder)
            sys.argv = ["-m", *rest[1:]]
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
            sys.argv = [kind, *rest]
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as left:
        code = left.code
    except BaseException:  # noqa: BLE001  as an interpreter does
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def run(job: Job, parent: Connection) -> list[Outcome]:
    """Fork the ranks of a job and return their outcomes, first to end first; none of them is left when this ends."""
    ranks: list[Rank] = []
    try:
        with reserved_port() as port:
            for number in range(job.size):
                ranks.append(_fork(job, number, port, parent, [rank.wire for rank in ranks]))
            _watch(job, ranks, parent)
    finally:
        for rank in ranks:
            rank.bury()
    return sorted((rank.outcome for rank in ranks if rank.outcome), key=lambda outcome: outcome.seconds)


def _watch(job: Job, ranks: list[Rank], parent: Connection) -> None:
    deadline, reason = time.monotonic() + job.timeout, "Timeout"
    while running := [rank for rank in ranks if rank.outcome is None]:
        if time.monotonic() > deadline:
            for rank in running:
                rank.interrupt(reason)
            return
        wait([parent, *(rank.wire for rank in running)], timeout=LOOK)
        if parent.poll():
            raise SystemExit("the tests are gone")  # nothing is asked while a job runs: this is the end of the pipe
        for rank in running:
            rank.look()
        if reason == "Timeout" and any(rank.outcome and rank.outcome.error_type for rank in ranks):
            deadline, reason = min(deadline, time.monotonic() + job.grace), "Stopped"
        if reason == "Stopped" and all(_is_suspended(rank.pid) for rank in running if rank.outcome is None):
            deadline = time.monotonic()  # nobody is left who could end by himself


def _is_suspended(pid: int) -> bool:
    """Whether SIGSTOP has stopped a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _fork(job: Job, number: int, port: int, parent: Connection, others: list[Connection]) -> Rank:
    ours, theirs = Pipe()
    output, stacks = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  Rank.bury closes them
    zygote = os.getpid()
    pid = os.fork()
    if not pid:
        _die_with(zygote)
        for wire in (parent, ours, *others):
            wire.close()
        for target in (1, 2):
            os.dup2(output.fileno(), target)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        faulthandler.enable(stacks)
        faulthandler.register(DUMP, stacks, all_threads=True)
        _be_rank(job, number, port, theirs)
    os.setpgid(pid, pid)
    theirs.close()
    return Rank(number, pid, ours, output, stacks)


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when the one that forked it ends, however that comes about."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _be_rank(job: Job, number: int, port: int, wire: Connection) -> NoReturn:
    message: tuple[str | None, Any]
    try:
        _surround(job, number, port)
        function = _find(job)
        arguments, keywords = unpack(job.arguments)
        if job.backend is not None:
            _join(job)
        result = _each(function, arguments, keywords) if job.is_each else function(*arguments, **keywords)
        message = (None, pack(result))
    except BaseException as error:  # noqa: BLE001  whatever it is, the test is told
        message = (type(error).__name__, _told(error))
    sys.stdout.flush()
    sys.stderr.flush()
    wire.send(message)
    if message[0] is not None:
        os._exit(1)
    while True:
        signal.pause()


def _each(function: Callable[..., Any], cases: Iterable[tuple[Any, ...]], keywords: dict[str, Any]) -> list[Any]:
    """One call after the other; what one has left behind is collected before the next."""
    results = []
    for arguments in cases:
        try:
            results.append(function(*arguments, **keywords))
        except BaseException as error:
            error.add_note(f"in the case {SHORT.repr(arguments)}")
            raise
        gc.collect()
    return results


def _surround(job: Job, number: int, port: int) -> None:
    """Take over the environment, folder and search path of the test, and the variables that torchrun would set."""
    os.environ.clear()
    os.environ.update(job.environment)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        os.environ[name] = str(job.size)
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(number)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    os.chdir(job.folder)
    sys.path[:] = job.search


def _find(job: Job) -> Callable[..., Any]:
    """The function itself, in a module of the same name as in the test, so that what is pickled means the same."""
    try:
        spec = importlib.util.find_spec(job.module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin != job.path:
        spec = importlib.util.spec_from_file_location(job.module, job.path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{job.path} cannot be loaded as {job.module}")
    if job.module not in sys.modules:
        sys.modules[job.module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[job.module])
    found: Any = sys.modules[job.module]
    for part in job.name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _join(job: Job) -> None:
    import torch

    torch.set_num_threads(1)
    # Longer than the job may take: of a collective that hangs we want to show the stacks, not its own timeout.
    torch.distributed.init_process_group(job.backend, timeout=timedelta(seconds=job.timeout + 30))


def _told(error: BaseException) -> str:
    """The traceback without our own frames; a bare assert, which pytest has not rewritten here, shows its values."""
    summary = traceback.TracebackException.from_exception(error)
    summary.stack[:] = [frame for frame in summary.stack if frame.filename != __file__]
    lines = list(summary.format())
    if isinstance(error, AssertionError) and not error.args:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        lines += [f"    {name} = {SHORT.repr(value)}\n" for name, value in frame.f_locals.items()]
    return "".join(lines)


def _plan_once() -> None:
    """Decide on a model without memory, which runs no operation: what that computes first, each rank would again.

    A section of the configuration is compiled when it is first given, and what reads a class keeps what it has read.
    """
    import torch

    from mizzen.api import sketch_of
    from mizzen.config.load import load
    from mizzen.config.schema import Config
    from mizzen.config.section import nest_in, schema_keys
    from mizzen.engine.prepare import version_of
    from mizzen.model.trace import flow_of
    from mizzen.order import ORDER
    from mizzen.plan.build import build

    nests = [nest_in(place.field.annotation) for place in schema_keys(Config)]
    for section in {Config, *(nest.section for nest in nests if nest)}:
        section.model_rebuild()
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    for stage in range(4):
        keys = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}}
        config = load(keys)
        build(config, 2, sketch_of(model, config), ORDER)
    flow_of(model)
    version_of("mizzen")


def _remember_entry_points() -> None:
    """Of what is installed: to look for accelerators, each rank would read a file of every package."""
    found: dict[Any, Any] = {}
    look = importlib.metadata.entry_points

    def entry_points(**wanted: Any) -> Any:
        key = (*dict.fromkeys(sys.path), *wanted.items())
        if key not in found:
            found[key] = look(**wanted)
        return found[key]

    importlib.metadata.entry_points = entry_points
    entry_points(group="mizzen.accelerators")


def _use_huge_pages() -> None:
    """Gather what was allocated so far in pages of 2 MiB: a fork copies a table of pages, and an end gives it back.

    Linux before 6.1 does not know how, and all stays as it is.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, inode, *name = line.split()
        if rights == "rw-p" and inode == "0" and (not name or name == ["[heap]"]):
            begin, end = (int(part, 16) for part in span.split("-"))
            first, last = -(-begin // HUGE) * HUGE, end // HUGE * HUGE
            if first < last:
                advise(first, last - first, MADV_COLLAPSE)


def serve(descriptor: int, search: list[str], more: Sequence[str] = ()) -> None:
    """Run jobs until the other end of the connection is gone; `more` is what ranks of this process need, too."""
    _load(search, more)
    _answer(Connection(descriptor))


def serve_all(listening: int, life: int, search: list[str]) -> None:
    """Fork a process that runs jobs for each connection that is made, until the other end of `life` is gone.

    Each such process ends when its connection does, or when this one is killed. The others do not have its connection,
    so that each end is noticed.
    """
    _load(search, ())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a child has ended, and none stays as a zombie
    zygote = os.getpid()
    with socket.socket(fileno=listening) as door, Connection(life) as whole:
        while whole not in wait([door, whole]):
            visitor, _ = door.accept()
            if not os.fork():
                _die_with(zygote)
                os.setsid()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                door.close()
                whole.close()
                _use_huge_pages()
                _answer(Connection(visitor.detach()))
                os._exit(0)
            visitor.close()
    with suppress(ChildProcessError):
        os.waitpid(-1, 0)  # to the last one


def _load(search: list[str], more: Sequence[str]) -> None:
    sys.path[:] = search
    for name in (*PRELOAD, *more):
        with suppress(ModuleNotFoundError):  # whoever needs it will miss it, and say so in a test
            importlib.import_module(name)
    _plan_once()
    _remember_entry_points()
    gc.collect()
    _use_huge_pages()
    gc.freeze()  # a collection in a rank would otherwise touch, and so copy, every page of the imported modules


def _answer(parent: Connection) -> None:
    parent.send(os.getpid())
    with suppress(EOFError):
        while True:
            asked = parent.recv()
            parent.send(run(asked, parent) if isinstance(asked, Job) else run_program(asked, parent))
