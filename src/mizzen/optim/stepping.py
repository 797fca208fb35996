"""One owner for a learning-rate schedule: the engine steps it, and notices when somebody else does too."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from mizzen.errors import UsageError


class Stepper:
    """Steps a schedule once per applied step, and refuses to go on when its position has moved in between.

    It looks at the position only, so it works for any schedule and also when the user holds the very object. Who sets
    `engine.lr_scheduler = None` takes the schedule over.
    """

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._position: Any = None

    def check(self, scheduler: Any, arguments: Mapping[str, Any]) -> None:
        """Refuse a step that the schedule could not follow, before anything has changed."""
        if scheduler is None:
            return
        found = _position(scheduler)
        if scheduler is self._scheduler and found != self._position:
            raise UsageError(
                f"the learning-rate schedule {type(scheduler).__name__} was left at {self._position} and is now at "
                f"{found}: the engine steps it after every applied step, so remove the other scheduler.step(), or set "
                "engine.lr_scheduler = None and step it yourself"
            )
        if scheduler is self._scheduler and not arguments:
            return
        try:
            signature(scheduler.step).bind(**arguments)
        except TypeError as error:
            raise UsageError(
                f"{type(scheduler).__name__}.step(): {error}; the arguments of a schedule's own step are given as "
                "engine.step(lr_kwargs={...})"
            ) from None

    def advance(self, scheduler: Any, arguments: Mapping[str, Any]) -> None:
        """One step. `arguments` are those of the schedule's own `step`."""
        if scheduler is None:
            return
        try:
            scheduler.step(**arguments)
        except Exception as error:  # noqa: BLE001  it may be anybody's schedule
            raise UsageError(
                f"the learning-rate schedule {type(scheduler).__name__} cannot go on: {type(error).__name__}: {error}"
            ) from error
        self._scheduler, self._position = scheduler, _position(scheduler)

    def forget(self) -> None:
        """The schedule was moved on purpose, by loading a state."""
        self._scheduler = self._position = None


def _position(scheduler: Any) -> Any:
    """Where a schedule is; None for one that does not say."""
    for name in ("last_batch_iteration", "last_epoch"):
        position = getattr(scheduler, name, None)
        if position is not None:
            return position
    return None
