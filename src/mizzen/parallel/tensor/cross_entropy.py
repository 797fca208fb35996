"""Cross entropy over logits of which each tensor-parallel rank has those of some tokens of the vocabulary.

Three numbers per token are exchanged, and no logits. Softmax and loss are taken in fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mizzen.errors import UsageError
from mizzen.model.home import evenly
from mizzen.parallel.tensor.exchange import largest, sum_out
from mizzen.parallel.tensor.layers import local_ids


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which of the logits this rank has."""

    size: int
    start: int
    stop: int

    @classmethod
    def of(cls, logits: Tensor, group: ProcessGroup | None, size: int | None) -> "Vocabulary":
        """That of a rank; without a size all ranks have as many logits, else those by torch.chunk's rule."""
        own, ranks, rank = logits.shape[-1], *((1, 0) if group is None else (group.size(), group.rank()))
        if size is None:
            return cls(own * ranks, own * rank, own * (rank + 1))
        parts = evenly(size, ranks)
        if own != parts[rank]:
            raise UsageError(
                f"rank {rank} of {ranks} has {own} logits per token, and of a vocabulary of {size} it should have "
                f"{parts[rank]}: the parts are {list(parts)}"
            )
        return cls(size, sum(parts[:rank]), sum(parts[: rank + 1]))


def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: ProcessGroup | None,
    *,
    size: int | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """The loss of every token, 0 where the target is to be ignored. `logits` are this rank's, of all tokens.

    `size` is that of the whole vocabulary; without it all ranks have as many logits.
    """
    if logits.shape[:-1] != target.shape:
        raise UsageError(
            f"logits of shape {list(logits.shape)} are for targets of shape {list(logits.shape[:-1])}, not "
            f"{list(target.shape)}"
        )
    found: Tensor = VocabCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, target, group, Vocabulary.of(logits, group, size), label_smoothing, ignore_index
    )
    return found


class VocabCrossEntropy(Function):
    """The loss of every token. What is kept for backward are the logits themselves, and two numbers per token."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: Any, own: Vocabulary, smoothing: float, ignored: int
    ) -> Tensor:
        """Take the losses."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        most = largest(wide.amax(-1), group, f"logits of a vocabulary of {own.size}")
        wide = wide - most.unsqueeze(-1)
        place, is_elsewhere = local_ids(target, own.start, own.stop)
        picked = wide.gather(-1, place.unsqueeze(-1)).squeeze(-1).masked_fill(is_elsewhere, 0)
        picked, total, every = sum_out(torch.stack([picked, wide.exp().sum(-1), wide.sum(-1)]), group)
        log_total = total.log()
        losses = log_total - (1 - smoothing) * picked - smoothing / own.size * every
        is_ignored = target == ignored
        ctx.save_for_backward(logits, log_total + most, place, is_elsewhere, is_ignored)
        ctx.own, ctx.smoothing = own, smoothing
        counted: Tensor = losses.masked_fill(is_ignored, 0)
        return counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Softmax less what is asked for, of this rank's logits."""
        logits, log_total, place, is_elsewhere, is_ignored = ctx.saved_tensors
        grad = (logits.to(log_total.dtype) - log_total.unsqueeze(-1)).exp_()
        grad -= ctx.smoothing / ctx.own.size
        asked = (1 - ctx.smoothing) * (~is_elsewhere).to(grad.dtype)
        grad.scatter_add_(-1, place.unsqueeze(-1), -asked.unsqueeze(-1))
        grad *= grads[0].masked_fill(is_ignored, 0).unsqueeze(-1)
        return grad.to(logits.dtype), None, None, None, None, None
