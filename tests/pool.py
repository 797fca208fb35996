"""Ranks for tests: `world(4).run(function, ...)` runs a function on four gloo ranks and returns what each returned.

`python(*words)` is a Python program that need not load torch again.

This is the side of the tests; the ranks and the process they are forked from are in `zygote.py`.
"""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any

from zygote import Job, Outcome, Program, pack, unpack


class RankFailed(AssertionError):
    """Some ranks did not return; `outcomes` has them all, first to end first, and the message every traceback."""

    def __init__(self, name: str, outcomes: Sequence[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if outcome.error_type]
        lines = [f"{len(failed)} of {len(outcomes)} ranks did not return from {name}; the first to fail comes first"]
        for outcome in failed:
            lines += [f"--- rank {outcome.rank}: {outcome.error_type} after {outcome.seconds:.2f} s", outcome.traceback]
        super().__init__("\n".join(lines))
        self.outcomes = tuple(outcomes)


def _launch(
    call: str, environment: Mapping[str, str], descriptors: Sequence[int], stream: IO[bytes] | None = None
) -> "subprocess.Popen[bytes]":
    """A process that makes this call of `zygote.py`, with these files open."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import zygote; zygote.{call}"
    # The numeric libraries read their thread counts when they are loaded; a zygote must not have threads.
    given = dict(environment, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    # Whoever asks CUDA itself whether there is a device can fork no rank that uses one.
    given["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        env=given,
        stdout=stream,
        stderr=stream,
        pass_fds=descriptors,
        start_new_session=True,
    )


def _log(address: str) -> Path:
    """Where an `Origin` and its zygotes write."""
    return Path(address).with_name("log")


class Origin:
    """One process that imports what all zygotes need, and forks one for each `Pool` that is given its `address`.

    It begins to import at once. A pool that asks before it is done waits; it ends with whoever has made it.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp()  # for this user alone
        self.address = f"{self._folder}/zygotes"
        self._life, theirs = Pipe()
        with socket.socket(socket.AF_UNIX) as door, _log(self.address).open("wb") as stream:
            door.bind(self.address)
            door.listen()
            files = (door.fileno(), theirs.fileno())
            self._process = _launch(f"serve_all({files[0]}, {files[1]}, {sys.path!r})", os.environ, files, stream)
        theirs.close()

    def close(self) -> None:
        """End it, and with it what is left of the zygotes."""
        self._life.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Pool:
    """One zygote for as many jobs as come, one after the other. It starts with the first and again after a mishap.

    It imports `more` than every zygote does, in the environment and with the search path that are given here. With the
    address of an `Origin` it is a fork of that, if that is still there.
    """

    def __init__(
        self,
        more: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        search: Sequence[str] = (),
        origin: str | None = None,
    ) -> None:
        self._more, self._env, self._search, self._origin = tuple(more), env, list(search), origin
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: Connection | None = None
        self.pid: int | None = None
        """The zygote's process id, while there is one."""

    def submit(self, job: Job | Program) -> Any:
        """Run a job or a program, and give its `Outcome`s or how it `Ended`.

        What interrupts the wait (a test's timeout, control-C) ends the zygote and with it the ranks.
        """
        try:
            wire = self._wire or self._start()
            wire.send(job)
            return wire.recv()
        except BaseException as error:
            self.close()
            if isinstance(error, EOFError | ConnectionError):
                said = _log(self._origin).read_text(errors="replace")[-4000:] if self._origin else "its stderr says why"
                raise RuntimeError(f"the process that ranks are forked from has died; {said}") from error
            raise

    def python(
        self,
        *words: object,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
    ) -> "subprocess.CompletedProcess[str]":
        """What `subprocess.run([sys.executable, *words], ...)` gives, from a process that has torch and mizzen already.

        For scripts, `-c` and `-m`; not for tests of what a fresh interpreter loads, or of the process itself.
        """
        line = tuple(map(str, words))
        program = Program(line, timeout, dict(os.environ if env is None else env), os.path.abspath(cwd or os.getcwd()))
        ended = self.submit(program)
        if ended.code is None:
            raise subprocess.TimeoutExpired(line, timeout, ended.out, ended.err)
        return subprocess.CompletedProcess(line, ended.code, ended.out, ended.err)

    def _start(self) -> Connection:
        self._wire = self._forked() or self._launched()
        self.pid = self._wire.recv()
        return self._wire

    def _forked(self) -> Connection | None:
        if self._origin is None:
            return None
        with socket.socket(socket.AF_UNIX) as door:
            try:
                door.connect(self._origin)
            except OSError:  # somebody has killed it
                return None
            return Connection(door.detach())

    def _launched(self) -> Connection:
        ours, theirs = Pipe()
        call = f"serve({theirs.fileno()}, {[*self._search, *sys.path]!r}, {self._more!r})"
        self._process = _launch(call, os.environ if self._env is None else self._env, [theirs.fileno()])
        theirs.close()
        return ours

    def close(self) -> None:
        """End the zygote: it takes its ranks along when its connection closes."""
        wire, process, pid = self._wire, self._process, self.pid
        self._wire = self._process = self.pid = None
        watched = _watched(pid) if pid is not None and process is None else None
        if wire is not None:
            wire.close()
        if process is not None:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if watched is not None:  # a child of another process
            if not select.select([watched], [], [], 5)[0]:
                signal.pidfd_send_signal(watched, signal.SIGKILL)
                select.select([watched], [], [])
            os.close(watched)


def _watched(pid: int) -> int | None:
    """A file that can be read when the process has ended, or none where it has."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


@dataclass(frozen=True, slots=True)
class World:
    """A number of ranks to run functions on."""

    pool: Pool
    size: int
    backend: str | None

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = 120,
        grace: float = 5,
        expect_failure: bool = False,
        **keywords: Any,
    ) -> list[Any]:
        """Run a top-level function on every rank; the results in rank order.

        `RankFailed` when a rank raises, dies or is not back after `timeout` seconds. After the first failure the others
        have `grace` seconds to end by themselves. With `expect_failure` the result is every rank's `Outcome` instead.
        Ranks have the environment variables and the folder that the test has now.
        """
        __tracebackhide__ = True
        return self._run(function, pack((arguments, keywords)), timeout, grace, expect_failure)

    def each(
        self, function: Callable[..., Any], cases: Iterable[tuple[Any, ...]], *, timeout: float = 120, **keywords: Any
    ) -> list[list[Any]]:
        """Run it with each tuple of arguments, one after the other on the same ranks.

        By case, the results in rank order. For cases that are compared with each other: a second engine of a process
        costs a third of the first.
        """
        __tracebackhide__ = True
        ranks = self._run(function, pack((tuple(cases), keywords)), timeout, 5, False, is_each=True)
        return [list(results) for results in zip(*ranks, strict=True)]

    def _run(
        self,
        function: Callable[..., Any],
        arguments: bytes,
        timeout: float,
        grace: float,
        expect_failure: bool,
        is_each: bool = False,
    ) -> list[Any]:
        __tracebackhide__ = True
        if "<" in function.__qualname__:
            raise TypeError(
                f"{function.__qualname__}: ranks import the function by name, so it must be at the top level"
            )
        job = Job(
            size=self.size,
            backend=self.backend,
            module=function.__module__,
            path=function.__code__.co_filename,
            name=function.__qualname__,
            arguments=arguments,
            timeout=timeout,
            grace=grace,
            environment=dict(os.environ),
            search=list(sys.path),
            folder=os.getcwd(),
            is_each=is_each,
        )
        ended = self.pool.submit(job)
        ranks = sorted(ended, key=lambda outcome: outcome.rank)
        for outcome in ranks:
            if outcome.output:
                print(f"--- output of rank {outcome.rank}\n{outcome.output}", end="")
        if not expect_failure and any(outcome.error_type for outcome in ended):
            raise RankFailed(function.__qualname__, ended)
        ranks = [outcome if outcome.error_type else replace(outcome, value=unpack(outcome.value)) for outcome in ranks]
        return ranks if expect_failure else [outcome.value for outcome in ranks]
