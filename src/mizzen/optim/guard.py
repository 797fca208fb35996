"""What would make a step other than it seems: an optimizer nobody sees, parameters that join one or change sides."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mizzen.errors import UsageError
from mizzen.wording import and_more


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


class ParameterGuard:
    """Refuse a step after parameters have joined an optimizer: nobody would sum their gradients over the ranks."""

    def __init__(self, optimizer: Optimizer | None, model: nn.Module) -> None:
        self.optimizer = optimizer
        self.model = model
        self._known = self._now()

    def _now(self) -> list[Any]:
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        return [each for group in groups for each in group["params"]]

    def check(self) -> None:
        """Before a step."""
        known = set(map(id, self._known))
        if joined := [each for each in self._now() if id(each) not in known]:
            raise self.refusal(joined)

    def refusal(self, parameters: Iterable[Any]) -> UsageError:
        """What to say of parameters that somebody wants to join."""
        names = {id(each): f"'{name}'" for name, each in self.model.named_parameters()}
        found = [names.get(id(each), "a tensor that is not in the model") for each in parameters] or ["a group"]
        return UsageError(
            f"{and_more(found, 1)} cannot join the optimizer after initialize(), which decides what is trained: give "
            "every group to initialize(), one whose turn comes later with lr 0 until then; or make a new engine of "
            "engine.module, whose optimizer states begin anew"
        )


class Sides:
    """Refuse a step after `requires_grad` of a parameter was changed: who is trained was decided with the plan.

    Momentum and weight decay would go on to move one that was frozen, and nobody would step one that was thawed.
    """

    def __init__(self, model: nn.Module) -> None:
        frozen = ((name, each) for name, each in model.named_parameters() if not each.requires_grad)
        self._frozen = [(name, ref(each)) for name, each in frozen]

    def check(self, trained: Iterable[Mapping[str, Tensor]]) -> None:
        """Before a step of these parameters, by name."""
        with torch._C.DisableTorchFunctionSubclass():  # a shard would answer in Python, and there are many
            stopped = [name for some in trained for name, each in some.items() if not each.requires_grad]
            begun = [name for name, kept in self._frozen if (each := kept()) is not None and each.requires_grad]
        if stopped or begun:
            names = and_more([f"'{name}'" for name in (*stopped, *begun)], 1)
            raise UsageError(
                f"requires_grad of {names} was changed to {not stopped} after initialize(), which decides what is "
                "trained: change it back before step(), or make a new engine of engine.module"
            )
