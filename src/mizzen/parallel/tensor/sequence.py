"""Activations that are cut along the sequence, between the cut layers of a model that knows nothing of it.

[Note: whole and in parts]
The first block of a model is given whole sequences and keeps this rank's part; the last one puts the parts together.
Between, modules with layers that are cut (readers) are given whole sequences again, so that every shape that they take
is the one they know. Who reads such a sequence decides on its gradient: a layer that is cut brings a part of it, which
is summed over the ranks and scattered; whatever else brings all of it on every rank, of which each keeps its part.

Without gradients nothing is cut: there is nothing to keep, and generating goes token by token.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mizzen.errors import UsageError
from mizzen.model.flow import Argument
from mizzen.parallel.tensor.cuts import SequenceCut, balanced
from mizzen.parallel.tensor.exchange import ScatterSequence, gather_along, scatter_sequence, split_along, sum_out
from mizzen.parallel.tensor.rng import differing

TOKENS = 1
"""The dimension of an activation that is cut."""


class SequenceParts:
    """Which tokens this rank has, while the blocks of a model are called."""

    def __init__(self, group: ProcessGroup, *, is_random: bool) -> None:
        self.group, self._is_random = group, is_random
        self.sizes: tuple[int, ...] | None = None
        """The tokens of each rank; None where sequences are whole."""
        self._part: Tensor | None = None
        self._whole: Tensor | None = None
        self._apart: AbstractContextManager[None] | None = None

    def split(self, whole: Tensor) -> Tensor:
        """This rank's part of what the first block is given."""
        # Inside of a re-entrant checkpoint there is no gradient either, but the input wants one.
        is_cut = torch.is_grad_enabled() or whole.requires_grad
        self.sizes = balanced(whole.shape[TOKENS], self.group.size()) if is_cut else None
        return split_along(whole, TOKENS, self.group, self.sizes) if is_cut else whole

    def join(self, part: Tensor) -> Tensor:
        """What the last block gives, whole."""
        return part if self.sizes is None else gather_along(part, TOKENS, self.group, self.sizes)

    def gather(self, part: Tensor) -> Tensor:
        """What a reader is given."""
        if self.sizes is None:
            return part
        own = self.sizes[self.group.rank()]
        if part.shape[TOKENS] != own:
            raise UsageError(
                f"tensor_parallel.sequence_parallel: {part.shape[TOKENS]} tokens of a part arrived where the first "
                f"block kept {own} of {sum(self.sizes)}: a forward of another length came before the backward of this "
                "one, which computes blocks again; give both the same length"
            )
        self._part, self._whole = part, gather_along(part, TOKENS, self.group, self.sizes)
        return self._whole

    def forget(self) -> None:
        """The reader has returned."""
        self._part = self._whole = None

    def read(self, given: Tensor) -> "Gathered | None":
        """A whole sequence as layers that are cut read it; None where this is none that was gathered."""
        if self.sizes is None or self._part is None or given is not self._whole:
            return None
        return Gathered(self._part, given, self.group, self.sizes)

    def leave(self, found: Tensor) -> Tensor:
        """The sum of what the ranks bring: this rank's part, or all of it."""
        if self.sizes is None:
            return sum_out(found, self.group)
        return scatter_sequence(found, TOKENS, self.group, self.sizes)

    def begin_block(self) -> None:
        """Let random numbers differ by rank."""
        if self._is_random and self.sizes is not None and self._apart is None:
            self._apart = differing(self.group)
            self._apart.__enter__()

    def end_block(self) -> None:
        """Let random numbers be alike again."""
        if self._apart is not None:
            self._apart.__exit__(None, None, None)
            self._apart = None


class Gathered:
    """A sequence that several layers which are cut read. Only the part of this rank is kept until backward."""

    def __init__(self, part: Tensor, whole: Tensor, group: ProcessGroup, sizes: tuple[int, ...]) -> None:
        self.whole: Tensor = ReadWhole.apply(part, whole.detach(), group, sizes)  # type: ignore[no-untyped-call]
        self._part, self._again = part.detach(), GatheredAgain(group, sizes)

    def product(self, weight: Tensor, bias: Tensor | None, *, is_transposed: bool) -> Tensor:
        """The outputs of a layer."""
        self._again.readers += weight.requires_grad
        found: Tensor = GatheredProduct.apply(  # type: ignore[no-untyped-call]
            self.whole, self._part, weight, bias, self._again, is_transposed
        )
        return found


class GatheredAgain:
    """The whole sequence in backward, gathered once for all layers that have read it."""

    def __init__(self, group: ProcessGroup, sizes: tuple[int, ...]) -> None:
        self._group, self._sizes = group, sizes
        self._whole: Tensor | None = None
        self.readers = 0
        """How many layers have not asked yet."""

    def take(self, part: Tensor) -> Tensor:
        """All of it; it stays until the last layer has asked."""
        whole = self._whole if self._whole is not None else gather_along(part, TOKENS, self._group, self._sizes)
        self.readers -= 1
        self._whole = whole if self.readers > 0 else None
        return whole


class ReadWhole(Function):
    """A sequence that was put together: the gradients of its parts are sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor, group: Any, sizes: tuple[int, ...]) -> Tensor:
        """Give it back as a view."""
        ctx.where = (TOKENS, group, sizes)
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum, and keep one part."""
        return ScatterSequence.apply(grads[0], *ctx.where), None, None, None  # type: ignore[no-untyped-call]


class GatheredProduct(Function):
    """A linear layer that keeps its part of the input, and gathers the others again for the gradient of its weight."""

    @staticmethod
    def forward(
        ctx: Any,
        whole: Tensor,
        part: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        again: GatheredAgain,
        transposed: bool,
    ) -> Tensor:
        """All tokens, this rank's outputs."""
        ctx.save_for_backward(part, weight)
        ctx.again, ctx.transposed = again, transposed
        if not transposed:
            return nn.functional.linear(whole, weight, bias)
        found = whole @ weight
        return found if bias is None else found + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Of the input all tokens, this rank's share of the sum."""
        part, weight = ctx.saved_tensors
        by_input = grads[0] @ (weight.T if ctx.transposed else weight) if ctx.needs_input_grad[0] else None
        by_weight = by_bias = None
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        if ctx.needs_input_grad[2]:
            given = ctx.again.take(part).reshape(-1, part.shape[-1])
            by_weight = given.T @ rows if ctx.transposed else rows.T @ given
        if ctx.needs_input_grad[3]:
            by_bias = rows.sum(0)
        return by_input, None, by_weight, by_bias, None, None


def follow_blocks(cut: SequenceCut, modules: dict[str, nn.Module], group: ProcessGroup) -> SequenceParts:
    """Let the blocks of one part of a model that are here work on parts of sequences, and their readers on whole ones.

    Hooks, and no other forward: fused operations and recomputation take that place. What a block or a reader ends by is
    also called when it fails: one that is computed again ends by an exception once all that backward needs is there.
    """
    parts = SequenceParts(group, is_random=cut.is_random)
    for stack in cut.stacks:
        here = [(modules[entry.path], entry.argument) for entry in stack if entry.path in modules]
        for at, (block, argument) in enumerate(here):
            if at == 0:
                _change_argument(block, argument, parts.split)
            if cut.is_random:
                block.register_forward_pre_hook(_calling(parts.begin_block))
                block.register_forward_hook(_calling(parts.end_block), always_call=True)
            if at == len(here) - 1:
                _change_output(block, parts.join)
    for entry in cut.readers:
        if entry.path in modules:
            _change_argument(modules[entry.path], entry.argument, parts.gather)
            modules[entry.path].register_forward_hook(_calling(parts.forget), always_call=True)
    return parts


def _calling(function: Callable[[], None]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        function()

    return hook


def _change_argument(module: nn.Module, argument: Argument, change: Callable[[Tensor], Tensor]) -> None:
    place, name = argument.place, argument.name

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if place < len(args):
            return (*args[:place], change(args[place]), *args[place + 1 :]), kwargs
        return args, {**kwargs, name: change(kwargs[name])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _change_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return change(output)
        first, *others = output
        return type(output)((change(first), *others))

    module.register_forward_hook(hook)
