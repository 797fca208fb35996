"""When a run is asked to stop: the ranks agree in the step, save before the next one, and leave.

The request reaches a rank through its progress record, set by the supervisor of `mizzen run`. It travels with the one
reduction of a step, so that all ranks learn of it after the same step. The save then waits until the user's loop comes
back, to the engine or to its loader: by then everything that belongs to the step (a scheduler of the user's own, a
counter) is done, and nothing of the next one is. See docs/launcher.md for the exit codes.

In an evaluation no step comes for long, and the ranks agree through the store of the job instead. A collective would
not do there: ranks may evaluate unequal numbers of batches, or only one of them evaluates, and a rank that enters a
collective that another never comes to is worse off than one that goes on for a while.
"""

import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from mizzen.comm.agreement import Ballot, wait_until
from mizzen.comm.communicator import current
from mizzen.engine.run_state import RunState
from mizzen.environment import Switches, environ, integer
from mizzen.launcher.signals import SAVED, UNSAVED
from mizzen.log import get_logger, log_dist
from mizzen.progress import get_progress

if TYPE_CHECKING:
    from mizzen.comm.backend import KeyValueStore

INTERRUPT: Final = (signal.SIGINT, signal.default_int_handler)
ClientState = Callable[[], Mapping[str, Any]]
Save = Callable[[Mapping[str, Any]], bool]


# [Note: stopping ahead]
# Rank 0 names a call that lies a few ahead of its own, before it takes part in anything further. Where the calls hold
# collectives, no rank is more than a few calls away from rank 0, so all of them see the word before they come to that
# call, and all stop at exactly it. Where the calls hold none, a rank may be past it, and stops where it is: nothing
# that it has done since changes what is saved. Either way all of them end up here, and then say so. A rank that leaves
# the evaluation instead, and would wait for the others in a step, calls the stop off; so does one that has waited for
# too long. Who is the first to give a verdict has given it for all.
AHEAD: Final = 8
"""How many calls lie between the word and the stop: more than a loop fetches or runs ahead of the other ranks."""
PATIENCE: Final = 10.0
"""Seconds that rank 0 waits for the others at the call that it has named."""
LONGEST: Final = 60.0
"""Seconds that the others wait for rank 0, which may have some calls to go."""
PAUSE: Final = 0.02


class EvaluationStop:
    """The agreement of all ranks to stop in the middle of an evaluation, about one request, after one step."""

    def __init__(self, store: "KeyValueStore | None", rank: int, size: int, step: int) -> None:
        self.step = step
        self._store = store
        self._rank = rank
        self._size = size
        self._place = f"evaluation-stop/{integer(environ(), 'TORCHELASTIC_RESTART_COUNT', 0)}/{step}"
        self._has_asked = self._is_named = self._is_over = False

    def is_agreed(self, call: int) -> bool:
        """Whether all ranks stop now. Every rank asks at each of its calls, once it knows of the request."""
        if self._store is None or self._is_over:
            return self._store is None
        asked, here = (Ballot(self._store, self._key(word), range(self._size)) for word in ("asked", "here"))
        if not self._has_asked:
            self._has_asked = True
            asked.cast(self._rank)
        if self._rank == 0 and not self._is_named and asked.is_complete():
            self._is_named = True
            self._store.set(self._key("stop"), str(call + AHEAD).encode())
        if not self._store.check([self._key("stop")]) or call < int(self._store.get(self._key("stop"))):
            return False
        here.cast(self._rank)
        wait_until(
            lambda: self._is_decided() or (self._rank == 0 and here.is_complete()),
            PATIENCE if self._rank == 0 else LONGEST,
            pause=PAUSE,
        )
        return self._decide(self._store, self._rank == 0 and here.is_complete())

    def cancel(self) -> None:
        """Let nobody wait for this rank, which has left the evaluation."""
        if self._store is not None and self._has_asked and not self._is_over:
            self._decide(self._store, False)

    def _decide(self, store: "KeyValueStore", is_time: bool) -> bool:
        self._is_over = True
        return store.compare_set(self._key("verdict"), b"", b"stop" if is_time else b"go on") == b"stop"

    def _is_decided(self) -> bool:
        return self._store is not None and self._store.check([self._key("verdict")])

    def _key(self, word: str) -> str:
        return f"{self._place}/{word}"


class Stopping:
    """What one engine knows of a request to stop."""

    def __init__(self) -> None:
        self.client_state: ClientState = dict
        """What the user wants in a checkpoint that is made because of a request."""
        self._progress = get_progress()
        self._is_agreed = False
        self._calls = 0
        self._evaluation: EvaluationStop | None = None
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

    def stop_if_asked(self, run: RunState, *, is_training: bool, save: Save) -> None:
        """Save and leave, if all ranks have agreed to. Every rank comes here after the same step.

        `save(client_state)` makes a checkpoint, waits for it, and says whether there is one.
        """
        self._calls += 1
        if self._evaluation is not None and is_training:
            self._evaluation.cancel()
        if self._is_agreed or self.is_asked:
            is_time = self._is_agreed if is_training else self._stops_evaluation(run)
            if is_time:
                self._is_agreed = False
                self._save_and_exit(run, save)

    def _stops_evaluation(self, run: RunState) -> bool:
        """Whether all ranks stop in the evaluation that they are in. If one is in none, the next step tells them all.

        A request that was cancelled is not taken up again before the next step.
        """
        if not run.is_between_steps:
            return False
        step, ranks = run.applied_steps, run.mesh.layout.world
        if self._evaluation is None or self._evaluation.step != step:
            store = current().backend.store() if ranks > 1 else None
            self._evaluation = EvaluationStop(store, run.mesh.rank, ranks, step)
        return self._evaluation.is_agreed(self._calls)

    def _save_and_exit(self, run: RunState, save: Save) -> NoReturn:
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
