"""What sees every optimizer of the process step, while an engine lives."""

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from mizzen.errors import UsageError


class Guard:
    """Refuse the step of an optimizer that was built on parameters of an engine: it would find no gradient there."""

    def __init__(self, name_of: Callable[[nn.Parameter], str | None]) -> None:
        self.name_of = name_of
        """The name of a parameter that an engine trains."""

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        """Before a step."""
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if (name := self.name_of(parameter)) is not None:
                raise UsageError(
                    f"this {type(optimizer).__name__} was built on '{name}', which an engine trains, and would find no "
                    "gradient there: give it to initialize(optimizer=...), and call engine.step()"
                )
