"""What a backward is for that has reached the units of a model: gradients of parameters, or of inputs alone.

`torch.autograd.grad(loss, x)` runs through the same units as `loss.backward()` and leaves nothing on their parameters.
Units are then gathered and let go, and nothing is summed over the ranks.
"""

from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from mizzen.errors import NotBuilt

AGAIN: Final = (
    "a backward that shall be differentiated again (create_graph=True for a gradient penalty, torch.func.grad, "
    "torch.autograd.functional.hessian) at ZeRO stage 3, where parameters are let go on its way: run both backwards "
    "inside mizzen.zero.GatheredParameters(model.parameters()), or use stage 2"
)


class Backward:
    """The backward that runs now. Every unit tells when it is reached, before it is gathered, and when it is left."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end
        """Lets every unit send what it has."""
        self.parameters: dict[str, Tensor] = {}
        """The objects on which autograd leaves gradients, of all units, by the names of the parameters."""
        self.leaves_gradients = False
        """Whether it leaves a gradient on some parameter."""
        self._task = -1

    def reach(self, *, is_first: bool, is_open: bool) -> None:
        """It has come to a unit, as the first one or not, which stays gathered or does not.

        A reentrant checkpoint runs a backward inside of one, in which the parameters may be.
        """
        if torch.is_grad_enabled() and not is_open:
            raise NotBuilt(AGAIN)
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):  # -1: it is over
            self._task = task
            self.leaves_gradients = (self.leaves_gradients and not is_first) or _some_arrive(self.parameters.values())

    def finish(self) -> None:
        """Let units send gradients that came without their notice.

        A penalty on the gradient of an input, with nothing beside it, need not come through the output of any unit.
        """
        if any(parameter.grad is not None for parameter in self.parameters.values()):
            self.leaves_gradients = True
            self.end()


def _some_arrive(parameters: Iterable[Tensor]) -> bool:
    """Whether the backward that runs will add to the gradient of one of these."""
    return any(_arrives(parameter) for parameter in parameters if parameter.requires_grad)


def _arrives(parameter: Tensor) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
    except RuntimeError:  # torch.autograd.grad hands it to its caller
        return False
