"""A call whose inside backward computes again, instead of finding it kept. torch does the work; this says how.

Which blocks of a model are called so is decided in `recompute.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from mizzen.accelerator import get_accelerator
from mizzen.ambient import AMBIENT
from mizzen.errors import UsageError
from mizzen.kernels.untraced import untraced
from mizzen.rewrite.forward import ReplacedForward
from mizzen.rewrite.streams import RandomStreams

PRODUCTS: Final = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution"),
        *("aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm"),
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        *("aten::_flash_attention_forward", "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward"),
        *("flex_attention", "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"),
    }
)
"""Operators whose results cost more to compute again than to keep."""

CACHES: Final = ("past_key_values", "past_key_value", "layer_past")
"""Arguments of a block that hold keys and values of earlier tokens. A block writes to them."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Those of a call and of its repetition."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is kept of such a call until backward. Its inputs always are."""

    products: bool = False
    """Also the results of matrix products and attention."""
    on_host: bool = False
    """The inputs rest in host memory."""


class Recomputed(ReplacedForward):
    """Stands in the place of a module's `forward` and calls it so that backward computes it again."""

    def __init__(self, forward: Callable[..., Any], keeping: Keeping) -> None:
        super().__init__(forward)
        self.keeping = keeping
        self.names = tuple(signature(forward).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own `forward` returns."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        for name in CACHES:
            if given.get(name) is not None and torch.is_grad_enabled():
                raise UsageError(
                    f"a block that is computed again in backward was given a cache, {name}=, which it would fill "
                    "twice: set model.config.use_cache = False, or call the model with use_cache=False"
                )
        return replayed(self.__wrapped__, args, kwargs, self.keeping)


def replayed(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], keeping: Keeping) -> Any:
    """Call a function; backward calls it again, with the random numbers and the autocast of this call."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if AMBIENT.checkpointing is not None and AMBIENT.checkpointing.streams.are_used:
        return _replayed_with_streams(function, args, kwargs, keeping)
    options = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if keeping.products else {}
    return _replayed(function, args, kwargs, keeping, options)


def _replayed(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    keeping: Keeping,
    options: Mapping[str, Any],
) -> Any:
    """torch looks only at positional tensors, so all tensors are handed over by position, however they came.

    Those it keeps through autograd's hooks, and their device is the one whose generator is rewound.
    """
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs)
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    if keeping.on_host:
        # Masks and positions are the same for all blocks: a copy of them for each would cost more than it frees.
        tensors = {key: value for key, value in tensors.items() if value.requires_grad} or tensors
    names, count = tuple(tensors), len(args)
    others = {key: value for key, value in given.items() if key not in tensors}

    def call(*values: Tensor) -> Any:
        whole = {**others, **dict(zip(names, values, strict=True))}
        by_name = {key: value for key, value in whole.items() if isinstance(key, str)}
        return function(*[whole[place] for place in range(count)], **by_name)

    with _resting_place(keeping):
        return checkpoint(call, *tensors.values(), use_reentrant=False, **options)


# Never traced: a compiler accepts no contexts but torch's own, and without this one a repetition that it leaves to
# Python would draw other numbers from the streams.
@untraced
def _replayed_with_streams(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], keeping: Keeping
) -> Any:
    selective: Callable[[], Contexts] = (
        partial(create_selective_checkpoint_contexts, _policy) if keeping.products else noop_context_fn
    )

    def contexts() -> Contexts:
        first, again = selective()
        return first, _Again(AMBIENT.checkpointing.streams, again)

    return _replayed(function, args, kwargs, keeping, {"context_fn": contexts})


def _resting_place(keeping: Keeping) -> AbstractContextManager[Any]:
    if not keeping.on_host:
        return nullcontext()
    accelerator = get_accelerator()
    return save_on_cpu(pin_memory=not accelerator.shares_host_memory, device_type=accelerator.name)


class _Again:
    """The context of a repetition: named streams are where the call found them. May be entered several times."""

    def __init__(self, streams: RandomStreams, inner: AbstractContextManager[Any]) -> None:
        self._streams = streams
        self._states = streams.get_states()
        self._inner = inner
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._streams.rewound(self._states))
        self._entered.enter_context(self._inner)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.__exit__(kind, error, trace)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operator.name().partition(".")[0] in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE
