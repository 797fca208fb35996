"""The side of a rank: build a system when told to, run some steps when it is its turn, and wait, blocked, otherwise.

A workload is a module with `prepare(system, settings) -> Step`, where `Step` takes the number of a step and returns its
loss. Nothing here knows what is trained, or by whom.
"""

import gc
import importlib
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from bench.anatomy import examine

Step = Callable[[int], Any]
Ended: Final = ("end", ())
LIBRARIES: Final = ("torch", "transformers", "deepspeed")


@dataclass(frozen=True, slots=True)
class Failed:
    """What a rank answers when an order failed."""

    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Ready:
    """What a rank answers when its system stands."""

    setup: float
    about: dict[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a rank answers when it has run some steps."""

    seconds: list[float]
    """Of each step, by the clock on the wall or in the device's stream."""
    processor: list[float]
    """Seconds of processor time of each step, all threads of this rank together."""
    losses: list[float]
    peak: int
    """Bytes, the most so far: allocated on a GPU, resident elsewhere."""
    held: int = 0
    """Bytes on a GPU after the last step, once what leaves it then has left."""
    resident: int = 0
    """Bytes of host memory, the most so far, less what was there before the system was built."""


class Player:
    """One rank of one system."""

    def __init__(self, workload: str, system: str) -> None:
        self.workload = importlib.import_module(workload)
        self.system = system
        self.step: Step | None = None
        self.done = 0
        self.before = 0

    def prepare(self, settings: dict[str, Any]) -> Ready:
        """Build the system."""
        begin, self.before = time.perf_counter(), _resident()
        self.step = self.workload.prepare(self.system, settings)
        self._synchronize()
        return Ready(time.perf_counter() - begin, self._about())

    def run(self, steps: int) -> Turn:
        """So many steps, timed one by one; nothing is read from a device before the last of them."""
        gc.collect()
        clock = _DeviceClock() if self._is_on_device() else _HostClock(time.perf_counter)
        effort = _HostClock(time.process_time)
        losses = []
        for number in range(steps + 1):
            clock.tick()
            effort.tick()
            if number < steps:
                losses.append(self.take_step())
        laps, numbers = clock.laps(), [float(loss) for loss in losses]
        held = _resting_on_device() if self._is_on_device() else 0
        return Turn(laps, effort.laps(), numbers, self._peak(), held, _resident() - self.before)

    def profile(self, steps: int) -> dict[str, Any]:
        """Where the time of some steps goes."""
        return examine(self.take_step, steps)

    def take_step(self) -> Any:
        """The next step."""
        if self.step is None:
            raise RuntimeError(f"{self.system} was told to run before it was told to prepare")
        self.done += 1
        return self.step(self.done - 1)

    def _about(self) -> dict[str, str]:
        """The versions that this rank has loaded, and its device."""
        loaded = [sys.modules[name] for name in LIBRARIES if name in sys.modules]
        versions = [(module.__name__, str(getattr(module, "__version__", "?")).strip()) for module in loaded]
        found = {"drop-in" if "mizzen" in version else name: version for name, version in versions}
        return {**found, "on": torch.cuda.get_device_name()} if self._is_on_device() else found

    def _is_on_device(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]

    def _synchronize(self) -> None:
        if self._is_on_device():
            torch.cuda.synchronize()

    def _peak(self) -> int:
        if self._is_on_device():
            return int(torch.cuda.max_memory_allocated())
        return _resident()


def _resting_on_device() -> int:
    """Bytes on the GPU when they no longer become fewer."""
    before, found = -1, torch.cuda.memory_allocated()
    while found != before:
        time.sleep(0.5)
        torch.cuda.synchronize()
        before, found = found, torch.cuda.memory_allocated()
    return found


def _resident() -> int:
    """The most bytes of host memory that this process ever had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class _HostClock:
    """For work that is done when a call returns."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._ticks: list[float] = []

    def tick(self) -> None:
        """Now."""
        self._ticks.append(self._now())

    def laps(self) -> list[float]:
        """Seconds from each tick to the next."""
        return [b - a for a, b in zip(self._ticks, self._ticks[1:], strict=False)]


class _DeviceClock:
    """For work that a stream does later: marks in the stream, so that timing makes nobody wait."""

    def __init__(self) -> None:
        self._ticks: list[torch.cuda.Event] = []
        torch.cuda.synchronize()

    def tick(self) -> None:
        """When the device comes by here."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._ticks.append(event)

    def laps(self) -> list[float]:
        """Seconds from each tick to the next; waits for the last of them."""
        self._ticks[-1].synchronize()
        return [a.elapsed_time(b) / 1000 for a, b in zip(self._ticks, self._ticks[1:], strict=False)]


def serve(wire: Connection, workload: str, system: str) -> None:
    """Do what the controller says until it says that it is over, or goes away."""
    player: Player | None = None
    try:
        player = Player(workload, system)
        while (order := wire.recv()) != Ended:
            name, arguments = order
            calls: dict[str, Callable[..., Any]] = {
                "prepare": player.prepare,
                "run": player.run,
                "profile": player.profile,
            }
            wire.send(calls[name](*arguments))
    except (EOFError, KeyboardInterrupt):
        return
    except Exception as error:  # noqa: BLE001 - whatever it is, the controller shows it
        wire.send(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))


if __name__ == "__main__":
    from bench import player as importable  # so that answers are pickled under the name the controller knows

    with Connection(int(sys.argv[1])) as connection:
        importable.serve(connection, sys.argv[2], sys.argv[3])
    os._exit(0)  # what peers do at exit, and whom they wait for then, is nobody's business here
