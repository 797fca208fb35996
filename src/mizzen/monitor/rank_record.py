"""What each rank says of itself while a run goes on, in a file of its own: where it is, its memory, how it ended.

The file grows by a line every few seconds, from a thread beside training. `mizzen watch` reads it; nothing else does.
"""

import atexit
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mizzen.accelerator import Memory
from mizzen.config.observe import JsonlConfig
from mizzen.environment import World
from mizzen.monitor.output import LineFile, OutputGuard
from mizzen.monitor.report import Observer, StepReport
from mizzen.progress import announce_run, get_progress


def ranks_folder(events: Path) -> Path:
    """Where the ranks of a run keep their records: beside the run's events, `logs/run.ranks` for `logs/run.jsonl`."""
    return events.parent / f"{events.stem}.ranks"


class RankRecord(Observer):
    """Lines of five kinds: `start` (with the plan, on rank 0), `beat`, `load`, `save` and `end`."""

    def __init__(
        self,
        config: JsonlConfig,
        world: World,
        memory: Callable[[], Memory],
        plan: Mapping[str, Any] | None = None,
    ) -> None:
        self._world, self._memory, self._pid = world, memory, os.getpid()
        self._guard = OutputGuard(f"jsonl_monitor, the record of rank {world.rank}")
        self._is_over = threading.Event()
        self._turn = threading.Lock()
        """Whoever writes of where the rank is: nothing may come after its end."""
        folder = ranks_folder(Path(config.output_path).absolute() / f"{config.job_name}.jsonl")
        self._path = folder / f"rank-{world.rank}.jsonl"
        with self._guard:
            announce_run(folder)
        facts = {"rank": world.rank, "world": world.size, "host": socket.gethostname(), "pid": self._pid}
        self._write("start", **facts, heartbeat=config.heartbeat, **({"plan": plan} if plan is not None else {}))
        if config.heartbeat > 0:
            thread = threading.Thread(target=self._beat, args=(config.heartbeat,), name="mizzen-heartbeat", daemon=True)
            thread.start()
        # Many programs never destroy an engine; their ranks end all the same.
        atexit.register(self.close)

    def on_step(self, report: StepReport) -> None:
        """Nothing: the thread looks when it is time."""

    def on_load(self, step: int) -> None:
        """Note where training goes on."""
        self._write("load", step=step)

    def on_save(self, tag: str, step: int, seconds: float) -> None:
        """Note a checkpoint that is committed; rank 0 speaks for all."""
        if self._world.rank == 0:
            self._write("save", tag=tag, step=step, seconds=seconds)

    def close(self) -> None:
        """Note the end, and the error that nobody caught if that is why."""
        atexit.unregister(self.close)
        if self._is_over.is_set() or os.getpid() != self._pid:  # a process that was forked from this rank is not it
            return
        self._is_over.set()
        error = vars(sys).get("last_value")  # what the interpreter has printed a traceback of, when it ends by one
        with self._turn:
            self._write("end", error=f"{type(error).__name__}: {error}" if error is not None else "", **self._where())

    def _beat(self, interval: float) -> None:
        while True:
            with self._turn:
                if self._is_over.is_set():
                    return
                self._write("beat", **self._where())
            if self._is_over.wait(interval) or not self._guard.is_open:
                return

    def _where(self) -> dict[str, Any]:
        record = get_progress().record
        waiting = f"{record.collective} of {record.group}" if record.waiting else ""
        place = {"step": record.step, "unit": record.unit, "phase": record.phase, "waiting": waiting}
        return {**place, "memory": asdict(self._memory())}

    def _write(self, kind: str, **facts: Any) -> None:
        """Add a line. The file is not kept open: a save beside training may end after the engine that began it."""
        if self._guard.is_open:
            with self._guard:
                time = datetime.now(UTC).isoformat(timespec="milliseconds")
                file = LineFile(self._path)
                file.append(json.dumps({"time": time, "kind": kind, **facts}))
                file.close()
