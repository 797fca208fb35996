"""When a run is asked to stop: the ranks agree in the step, save before the next one, and leave.

The request reaches a rank through its progress record, set by the supervisor of `mizzen run`. It travels with the one
reduction of a step, so that all ranks learn of it after the same step. The save then waits until the user's loop comes
back, to the engine or to its loader: by then everything that belongs to the step (a scheduler of the user's own, a
counter) is done, and nothing of the next one is. In an evaluation, where no step comes for long, the ranks agree
through the store instead (`parley.py`). See docs/launcher.md for the exit codes.
"""

import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Final, NoReturn

from mizzen.comm.communicator import current
from mizzen.engine.parley import Parley
from mizzen.engine.run_state import RunState
from mizzen.environment import Switches, environ
from mizzen.launcher.signals import SAVED, UNSAVED
from mizzen.log import get_logger, log_dist
from mizzen.progress import get_progress

INTERRUPT: Final = (signal.SIGINT, signal.default_int_handler)
ClientState = Callable[[], Mapping[str, Any]]
Save = Callable[[Mapping[str, Any]], bool]


class Stopping:
    """What one engine knows of a request to stop."""

    def __init__(self) -> None:
        self.client_state: ClientState = dict
        """What the user wants in a checkpoint that is made because of a request."""
        self._progress = get_progress()
        self._is_agreed = False
        self._calls = 0
        self._parley: Parley | None = None
        if Switches.read(environ()).progress is not None and threading.current_thread() is threading.main_thread():
            self._listen()

    def _listen(self) -> None:
        """Take signals that reach the rank itself for requests, where the user's program does nothing with them.

        Slurm and others signal every process of a job, not only the supervisor. A second signal then ends the rank.
        """
        for number, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGUSR1, signal.SIG_DFL), INTERRUPT):
            if signal.getsignal(number) == usual:
                signal.signal(number, self._receive)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self._progress.ask_self_to_stop()
        signal.signal(number, signal.SIG_DFL)

    @property
    def is_asked(self) -> bool:
        """Whether this rank was asked; the others may not know yet."""
        return self._progress.is_asked_to_stop

    def agree(self, is_asked: bool) -> None:
        """Note what the step's reduction has brought: whether any rank was asked."""
        self._is_agreed = self._is_agreed or is_asked

    def heed(self, run: RunState, *, is_training: bool, save: Save) -> None:
        """Save and leave, if that was agreed. Every rank comes here after the same step.

        `save(client_state)` makes a checkpoint, waits for it, and says whether there is one.
        """
        self._calls += 1
        if self._parley is not None and is_training:
            self._parley.call_off()
        if self._is_agreed or self.is_asked:
            is_time = self._is_agreed if is_training else self._stops_here(run)
            if is_time:
                self._is_agreed = False
                self._leave(run, save)

    def _stops_here(self, run: RunState) -> bool:
        """Whether all ranks stand in an evaluation. If one does not, the next step tells them all."""
        return run.is_between_steps and self._talks(run).is_agreed(self._calls)

    def _talks(self, run: RunState) -> Parley:
        """One for each step: a request that was called off is not taken up again before the next one."""
        step, ranks = run.applied_steps, run.mesh.layout.world
        if self._parley is None or self._parley.step != step:
            store = current().backend.store() if ranks > 1 else None
            self._parley = Parley(store, run.mesh.rank, ranks, step)
        return self._parley

    def _leave(self, run: RunState, save: Save) -> NoReturn:
        self._progress.ask_self_to_stop()  # the request may have reached another rank; the supervisor looks for it here
        folder = run.settings.checkpoint.dir
        if folder is None:
            if run.mesh.rank == 0:
                get_logger().error(
                    "asked to stop after step %d, but nothing is saved: checkpoint.dir is not set", run.applied_steps
                )
            raise SystemExit(UNSAVED)
        self._progress.at(phase="saving before a stop")
        if not save(self.client_state()):
            raise SystemExit(UNSAVED)
        log_dist(f"asked to stop: saved step {run.applied_steps} in {folder}")
        raise SystemExit(SAVED)
