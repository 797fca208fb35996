"""Zeros for parameters of a unit that got no gradient, for a torch whose FSDP2 cannot see to that itself (before 2.13).

Without them a rank that took another branch inside a unit would reduce fewer elements than the others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, Variable
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

Parameters = Callable[[], Sequence[nn.Parameter]]


def fill_absent(module: nn.Module, parameters: Parameters) -> list[RemovableHandle]:
    """Give every parameter a gradient before the module's own are reduced.

    FSDP2 reduces them when backward has passed the module's inputs, or at the end of backward. Our hooks come after
    its own on the way in, and before its own on the way out, and so before it on the way back.
    """

    def fill() -> None:
        for parameter in parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def entering(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not torch.is_grad_enabled():
            return None
        leaves, tree = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if places:
            for place, passed in zip(places, _Passing.apply(fill, *(leaves[place] for place in places)), strict=True):
                leaves[place] = passed
        changed: tuple[Any, Any] = tree_unflatten(leaves, tree)
        return changed

    def leaving(module: nn.Module, args: Any, output: Any) -> None:
        def at_the_end(gradient: Tensor) -> Tensor:
            Variable._execution_engine.queue_callback(fill)
            return gradient

        if torch.is_grad_enabled():
            for leaf in tree_flatten(output)[0]:
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(at_the_end)

    return [
        module.register_forward_pre_hook(entering, with_kwargs=True),
        module.register_forward_hook(leaving, prepend=True),
    ]


class _Passing(Function):
    """Hands its inputs on; in backward it calls a function first."""

    @staticmethod
    def forward(ctx: Any, fill: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Nothing happens."""
        ctx.fill = fill
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Everything in the module has its gradients now."""
        ctx.fill()
        return (None, *gradients)
