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
from typing import TYPE_CHECKING, Any, Final, NoReturn

from mizzen.checkpoint.team import attempt
from mizzen.comm.communicator import current
from mizzen.engine.parley import Parley
from mizzen.environment import Switches, environ
from mizzen.launcher.stops import SAVED, UNSAVED
from mizzen.log import get_logger, log_dist
from mizzen.progress import get_progress

if TYPE_CHECKING:
    from mizzen.engine.face import Face

INTERRUPT: Final = (signal.SIGINT, signal.default_int_handler)
ClientState = Callable[[], Mapping[str, Any]]


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

    def heed(self, engine: "Face") -> None:
        """Save and leave, if that was agreed. Every rank comes here after the same step."""
        self._calls += 1
        if self._parley is not None and engine.training:
            self._parley.call_off()
        if self._is_agreed or self.is_asked:
            is_time = self._is_agreed if engine.training else self._stops_here(engine)
            if is_time:
                self._is_agreed = False
                self._leave(engine)

    def _stops_here(self, engine: "Face") -> bool:
        """Whether all ranks stand in an evaluation. If one does not, the next step tells them all."""
        return engine.is_between_steps and self._talks(engine).is_agreed(self._calls)

    def _talks(self, engine: "Face") -> Parley:
        """One for each step: a request that was called off is not taken up again before the next one."""
        step = engine.global_steps
        if self._parley is None or self._parley.step != step:
            store = current().backend.store() if engine.world_size > 1 else None
            self._parley = Parley(store, engine.global_rank, engine.world_size, step)
        return self._parley

    def _leave(self, engine: "Face") -> NoReturn:
        self._progress.ask_self_to_stop()  # the request may have reached another rank; the supervisor looks for it here
        settings = engine.settings.checkpoint
        if settings.dir is None:
            if engine.global_rank == 0:
                get_logger().error(
                    "asked to stop after step %d, but nothing is saved: checkpoint.dir is not set", engine.global_steps
                )
            raise SystemExit(UNSAVED)
        self._progress.at(phase="saving before a stop")
        _, unsaved = attempt(engine.finish_saving)
        if unsaved:
            get_logger().error("%s", unsaved)
        is_saved = engine.save_checkpoint(client_state=self.client_state(), async_save=False)
        engine.finish_saving()
        if not is_saved:
            raise SystemExit(UNSAVED)
        log_dist(f"asked to stop: saved step {engine.global_steps} in {settings.dir}")
        raise SystemExit(SAVED)
