"""The controller's side of a system: its ranks as processes that wait, blocked, until it is their turn."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from socket import socket
from typing import Any, Final

from bench.player import Ended, Failed
from mizzen.environment import environ

ROOT: Final = Path(__file__).parents[1]
PATIENCE: Final = 600.0
"""Seconds for one answer; the longest is a peer that compiles its kernels."""
TAIL: Final = 3000
"""Characters of a player's own output that an error shows."""


class PlayerError(RuntimeError):
    """A rank of a system failed or died."""


class Team:
    """The ranks of one system. They import torch at once, and touch a device only when they are told to prepare."""

    def __init__(self, workload: str, system: str, *, ranks: int, extra: Mapping[str, str] | None = None) -> None:
        self.system = system
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the team
        self._wires: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        port = _free_port()
        for rank in range(ranks):
            environment = {**environ(), **_of_torchrun(rank, ranks, port), **(extra or {})}
            self._start([workload, system], environment)

    def _start(self, words: list[str], environment: dict[str, str]) -> None:
        ours, theirs = Pipe()
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "bench.player", str(theirs.fileno()), *words],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
            )
        )
        theirs.close()
        self._wires.append(ours)

    @property
    def pids(self) -> list[int]:
        """The processes, by rank."""
        return [process.pid for process in self._processes]

    def ask(self, order: str, *arguments: Any) -> list[Any]:
        """Give all ranks the same order, and wait for what each of them answers."""
        for wire in self._wires:
            try:
                wire.send((order, arguments))
            except ConnectionError:
                raise self._died() from None
        answers: dict[int, Any] = {}
        while len(answers) < len(self._wires):
            missing = {wire: rank for rank, wire in enumerate(self._wires) if rank not in answers}
            ready = wait(list(missing), timeout=PATIENCE)
            if not ready:
                raise PlayerError(f"{self.system}: no answer to '{order}' in {PATIENCE:.0f} s\n{self._said()}")
            for wire, rank in missing.items():
                if wire in ready:
                    answers[rank] = self._answer(wire)
        return [answers[rank] for rank in range(len(self._wires))]

    def _answer(self, wire: Connection) -> Any:
        try:
            answer = wire.recv()
        except (EOFError, ConnectionError):
            raise self._died() from None
        if isinstance(answer, Failed):
            raise PlayerError(f"{self.system}: {answer.error}\n{answer.traceback}")
        return answer

    def _died(self) -> PlayerError:
        return PlayerError(f"{self.system}: a rank has died\n{self._said()}")

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-TAIL:]

    def end(self) -> None:
        """Let the ranks go: those that do not leave by themselves are ended."""
        for wire in self._wires:
            with suppress(OSError):  # it has gone already
                wire.send(Ended)
            wire.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def _of_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would tell a rank."""
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in named.items()}}


def _free_port() -> int:
    with socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
