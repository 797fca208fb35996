"""Zeros for parameters of a unit that got no gradient, for a torch whose FSDP2 cannot see to that itself (before 2.13).

Without them a rank that took another branch inside a unit would reduce fewer elements than the others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, Variable
from torch.utils.hooks import RemovableHandle

from mizzen.model.inputs import change_tensors, tensors_in

Parameters = Callable[[], Sequence[nn.Parameter]]


def fill_absent(module: nn.Module, parameters: Parameters) -> list[RemovableHandle]:
    """Give every parameter a gradient before the module's own are reduced.

    FSDP2 reduces them when backward has passed the module's inputs, or at the end of backward. Our hooks come after
    its own on the way in, and before its own on the way out, and so before it on the way back. As with its own, a
    compiler does not look into them.
    """

    def fill() -> None:
        for parameter in parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def entering(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        passed = iter(_pass(fill, _differentiable((args, kwargs))))
        changed = change_tensors((args, kwargs), lambda tensor: next(passed) if _counts(tensor) else tensor)
        return changed[0], changed[1]

    def leaving(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _differentiable(output):
            tensor.register_hook(lambda _: Variable._execution_engine.queue_callback(fill))  # type: ignore[no-untyped-call]

    return [
        module.register_forward_pre_hook(_unseen(entering), with_kwargs=True),
        module.register_forward_hook(_unseen(leaving), prepend=True),
    ]


def _unseen(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a compiler, which calls it and does not follow it."""
    unseen: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return unseen


def _counts(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _differentiable(structure: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(structure) if _counts(tensor)]


def _pass(fill: Callable[[], None], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if not tensors:
        return ()
    passed: tuple[Tensor, ...] = _Passing.apply(fill, *tensors)  # type: ignore[no-untyped-call]
    return passed


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
