"""Logits that are computed when somebody reads them, or never when a loss is all that is asked of them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from mizzen.errors import UsageError
from mizzen.model.inputs import change_tensors
from mizzen.model.wrapper import without_memory

SAMPLES: Final = 64
"""Elements of the weight that are compared, to see whether it has changed."""

FACTS: Final = frozenset(
    {
        *(Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.layout.__get__),  # type: ignore[attr-defined]
        *(Tensor.ndim.__get__, Tensor.requires_grad.__get__, Tensor.is_cuda.__get__),  # type: ignore[attr-defined]
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
    }
)
"""What can be said of logits that do not exist yet."""

RESHAPES: Final = frozenset({Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten})
"""What can be done to them while they do not exist, as long as the logits of one token stay together."""

CROSS_ENTROPY: Final = tuple(signature(functional.cross_entropy).parameters)[1:]
"""The names of its arguments behind the logits."""

Loss = Callable[[Tensor, Tensor, Mapping[str, Any]], Tensor | None]
"""(hidden states, labels, further arguments of cross_entropy) -> the loss; None when it has to be taken of logits."""


class LateLogits(Tensor):
    """A tensor without data that knows how to get it: any use of it computes the logits, once, as the model would have.

    Whoever uses one gets plain tensors. Gradients flow through them to the hidden states and the head.
    """

    hidden: Tensor
    head: Callable[[Tensor], Tensor]
    loss: Loss | None

    def __new__(
        cls, hidden: Tensor, weight: Tensor, head: Callable[[Tensor], Tensor], loss: Loss | None = None
    ) -> "LateLogits":
        """Shape, dtype and device of what the head would give now."""
        device = hidden.device.type
        is_autocast, lower = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        made: LateLogits = without_memory(
            cls,
            (*hidden.shape[:-1], len(weight)),
            dtype=lower if is_autocast else hidden.dtype,
            device=hidden.device,
            requires_grad=torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad),
        )
        return made

    def __init__(
        self, hidden: Tensor, weight: Tensor, head: Callable[[Tensor], Tensor], loss: Loss | None = None
    ) -> None:
        self.hidden, self.weight, self.head, self.loss = hidden, weight, head, loss
        device = hidden.device.type
        self._is_autocast, self._lower = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self._has_grad = torch.is_grad_enabled()
        self._sample = _sample(weight)
        self._computed: Tensor | None = None

    @property
    def is_computed(self) -> bool:
        """Whether somebody has used them."""
        return self._computed is not None

    def computed(self) -> Tensor:
        """The logits, with the precision and the graph of the call that they belong to."""
        if self._computed is None:
            if not torch.allclose(self._sample, _sample(self.weight), rtol=0.0, atol=0.0, equal_nan=True):
                raise UsageError(
                    "these logits are computed when they are read, and the head has changed since the forward that "
                    "they belong to: read them before step(), or set fused.head_loss to false"
                )
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(self._has_grad))
                device = self.hidden.device.type
                stack.enter_context(torch.autocast(device, dtype=self._lower, enabled=self._is_autocast))
                self._computed = self.head(self.hidden)
        return self._computed

    def _reshaped(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "LateLogits | None":
        """These logits in another shape, still late; None when the logits of a token would be torn apart."""
        shape = func(torch.empty(self.shape, device="meta"), *args, **kwargs).shape
        if shape[-1:] != self.shape[-1:]:
            return None
        hidden = self.hidden.reshape(*shape[:-1], self.hidden.shape[-1])
        return LateLogits(hidden, self.weight, lambda _: func(self.computed(), *args, **kwargs), self.loss)

    def _cross_entropy(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """The loss of these logits and labels without the logits, where that can be had."""
        given = {**dict(zip(CROSS_ENTROPY, args, strict=False)), **kwargs}
        labels = given.pop("target", None)
        if self.loss is None or self.dim() != 2 or not isinstance(labels, Tensor) or labels.is_floating_point():
            return None
        return self.loss(self.hidden, labels, given)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Facts are known; everything else is done to the logits themselves."""
        if func in FACTS:
            plain: Any = super().__torch_function__
            return plain(func, types, args, kwargs or {})
        if args and isinstance(late := args[0], LateLogits) and not late.is_computed:
            if func in RESHAPES and (reshaped := late._reshaped(func, args[1:], kwargs or {})) is not None:
                return reshaped
            if func is functional.cross_entropy and (found := late._cross_entropy(args[1:], kwargs or {})) is not None:
                return found
        return func(*change_tensors(tuple(args), _real), **change_tensors(dict(kwargs or {}), _real))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls that did not come through Python, such as collectives: the values alone."""
        return func(*change_tensors(tuple(args), _values), **change_tensors(dict(kwargs or {}), _values))


def _real(value: Tensor) -> Tensor:
    return value.computed() if isinstance(value, LateLogits) else value


def _values(value: Tensor) -> Tensor:
    return value.computed().detach() if isinstance(value, LateLogits) else value


def _sample(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLES)].clone()
