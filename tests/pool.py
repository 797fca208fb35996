"""Ranks for tests: `world(4).run(function, ...)` runs a function on four gloo ranks and returns what each returned.

`python(*words)` is a Python program that need not load torch again.

This is the side of the tests; the ranks and the process they are forked from are in `zygote.py`.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

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


class Pool:
    """One zygote for as many jobs as come, one after the other. It starts with the first and again after a mishap.

    It imports `more` than every zygote does, in the environment and with the search path that are given here.
    """

    def __init__(
        self, more: Sequence[str] = (), *, env: Mapping[str, str] | None = None, search: Sequence[str] = ()
    ) -> None:
        self._more, self._env, self._search = tuple(more), env, list(search)
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: Connection | None = None

    @property
    def pid(self) -> int | None:
        """The zygote's process id, while there is one."""
        return self._process.pid if self._process else None

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
                raise RuntimeError("the process that ranks are forked from has died; its stderr says why") from error
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
        ours, theirs = Pipe()
        here = str(Path(__file__).parent)
        words = f"{theirs.fileno()}, {[*self._search, *sys.path]!r}, {self._more!r}"
        code = f"import sys; sys.path.insert(0, {here!r}); import zygote; zygote.serve({words})"
        # The numeric libraries read their thread counts when they are loaded; a zygote must not have threads.
        given = os.environ if self._env is None else self._env
        environment = dict(given, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        # Whoever asks CUDA itself whether there is a device can fork no rank that uses one.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._wire = ours
        return ours

    def close(self) -> None:
        """End the zygote: it takes its ranks along when its connection closes."""
        wire, process = self._wire, self._process
        self._wire = self._process = None
        if wire is not None:
            wire.close()
        if process is not None:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


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
