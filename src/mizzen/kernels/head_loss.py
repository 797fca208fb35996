"""A linear head and cross entropy in one, over chunks of tokens: the logits of all tokens never exist at once.

Softmax and loss are taken in fp32. Where a gradient is wanted, those of hidden states and weight are formed chunk by
chunk in forward, for an incoming gradient of 1; backward multiplies them with the one that comes, in fp32. Where it is
known that most tokens have no label, those are left out. Shifting labels is the caller's business.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mizzen.kernels.gpu import gpu_code
from mizzen.kernels.untraced import untraced

MOST_CHUNKS: Final = 16
"""More and smaller chunks make matrix products slow, and each of them rounds the sum of weight gradients once more."""

CHUNK_BYTES: Final = 256 << 20
"""Fewer chunks while the fp32 logits of one fit in here."""

LABELLED_STEP: Final = 256
"""Tokens with a label are taken in multiples of so many."""

MOST_LABELLED: Final = 0.8
"""The largest part of all tokens that is worth being gathered; to gather and to scatter them is not free."""

SHRINK: Final = 1 / 32
"""Of fp16 hidden states, so that their product with a chunk's softmax stays inside of fp16."""


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Which logits a rank makes where a vocabulary is shared out, and what the ranks exchange for a softmax."""

    start: int
    stop: int
    size: int
    """Of the whole vocabulary."""
    widest: int
    """The size of the largest part, by which all ranks make chunks alike."""
    enter: Callable[[Tensor], Tensor]
    """Hidden states on their way to the parts: their gradient is the sum of the ranks'."""
    largest: Callable[[Tensor], Tensor]
    """The largest over the ranks, element by element; it may overwrite what it is given."""
    total: Callable[[Tensor], Tensor]
    """The sum over the ranks, likewise."""


def plain_head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """The specification: all logits, then cross entropy over them, in fp32 at least."""
    logits = functional.linear(hidden, weight, bias)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, weight.shape[0])
    return functional.cross_entropy(wide, labels.reshape(-1), ignore_index=ignore_index, reduction=reduction)


def rows_of(tokens: int, vocabulary: int) -> int:
    """How many tokens a chunk has when nobody says: as many as `CHUNK_BYTES` allow, in at most `MOST_CHUNKS` chunks."""
    fitting = CHUNK_BYTES // (4 * vocabulary)
    fewest = -(-tokens // MOST_CHUNKS)
    return max(1, min(tokens, max(fitting, -(-fewest // 128) * 128)))


def with_labels(hidden: Tensor, labels: Tensor, labelled: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The rows of tokens that have a label, and their labels. `labelled` of them have one, or fewer.

    The rows come in multiples of `LABELLED_STEP`, so that the sizes of products do not change with every batch: some
    without a label are taken along. Where that would be most of them, all stay where they are.
    """
    size = -(-labelled // LABELLED_STEP) * LABELLED_STEP
    if size > len(labels) * MOST_LABELLED:
        return hidden, labels
    rows = (labels != ignore_index).to(torch.uint8).argsort(descending=True, stable=True)[:size]
    return hidden.index_select(0, rows), labels.index_select(0, rows)


# A compiler could only unroll the chunks and lose the point of them.
@untraced
def head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    rows: int = 0,
    labelled: int | None = None,
    part: VocabularyPart | None = None,
) -> Tensor:
    """`plain_head_loss` without the logits. `rows` tokens make a chunk; 0 chooses.

    Whoever knows that at most `labelled` tokens have a label says so: the others are then left out. With a `part`
    weight and bias are those of this rank, and all ranks get the loss of all.
    """
    device, wants = hidden.device.type, torch.is_grad_enabled()
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    count = (targets != ignore_index).sum()
    if labelled is not None:
        flat, targets = with_labels(flat, targets, labelled, ignore_index)
    if part is not None:
        flat = part.enter(flat)
    work = _Work(
        ignore_index=ignore_index,
        rows=rows or rows_of(len(flat), len(weight) if part is None else part.widest),
        dtype=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype,
        hidden=wants and hidden.requires_grad,
        weight=wants and weight.requires_grad,
        bias=wants and bias is not None and bias.requires_grad,
        part=part,
    )
    total: Tensor = _HeadLoss.apply(flat, weight, bias, targets, work)  # type: ignore[no-untyped-call]
    if len(targets) < labels.numel():  # a label that was left out would be a wrong number: it is none instead
        total = torch.where(count <= len(targets), total, torch.full_like(total, torch.nan))
    if reduction == "sum":
        return total
    # Like torch's own: not a number where no label counts, and no gradient either.
    return torch.where(count > 0, total / count.clamp(min=1), torch.full_like(total, torch.nan))


@dataclass(frozen=True, slots=True)
class _Work:
    """How one loss is computed, and which gradients are wanted."""

    ignore_index: int
    rows: int
    dtype: torch.dtype
    """Of the matrix products."""
    hidden: bool
    weight: bool
    bias: bool
    part: VocabularyPart | None = None

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def is_trained(self) -> bool:
        return self.hidden or self.weight or self.bias


class _HeadLoss(Function):
    """The sum of the losses of all labels that count."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, work: _Work) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            losses, gradients = _walk(hidden, weight, bias, labels, work)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(*gradients)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        factor = incoming.reshape(1)
        found = [
            None if gradient is None else _multiplied(gradient, factor, dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *found, None, None


def _walk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, work: _Work
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss of every token, and the gradients of their sum."""
    low, low_bias = weight.to(work.dtype), None if bias is None else bias.to(work.dtype)
    losses = hidden.new_empty(len(hidden), dtype=work.wide)
    by_hidden = torch.empty_like(hidden, dtype=work.dtype) if work.hidden else None
    by_weight = torch.zeros_like(weight, dtype=_sum_dtype(weight, work)) if work.weight else None
    by_bias = torch.zeros_like(bias, dtype=work.wide) if work.bias and bias is not None else None
    for start in range(0, len(hidden), work.rows):
        part = slice(start, start + work.rows)
        piece = hidden[part].to(work.dtype)
        slopes = _slopes(functional.linear(piece, low, low_bias), labels[part], losses[part], work)
        if by_hidden is not None:
            torch.mm(slopes, low, out=by_hidden[part])
        if by_weight is not None:
            _add_product(by_weight, slopes, piece)
        if by_bias is not None:
            by_bias += slopes.sum(0, dtype=work.wide)
    return losses, (by_hidden, by_weight, by_bias)


# [Note: the sum of weight gradients]
# It is taken in the dtype of the weight, by addmm_ into one buffer: each chunk rounds it once, from fp32 inside of the
# product, and there are at most `MOST_CHUNKS` of them. A sum in fp32 would need a buffer of twice the size, and a copy
# for each chunk, for a gradient that leaves here in the dtype of the weight. fp16 is different: a sum over tokens that
# nobody has divided by their number can leave its range, where no loss scale would bring it back. There, and where
# autocast computes in another dtype than the weight has, the sum is an fp32 one, and each chunk is added to it.
def _sum_dtype(weight: Tensor, work: _Work) -> torch.dtype:
    return work.wide if work.dtype is torch.float16 else weight.dtype


def _add_product(total: Tensor, slopes: Tensor, piece: Tensor) -> None:
    if slopes.dtype is total.dtype:
        total.addmm_(slopes.T, piece)
    elif slopes.dtype is torch.float16:
        total.add_(torch.mm(slopes.T, piece * SHRINK), alpha=1 / SHRINK)
    else:
        total.add_(torch.mm(slopes.T, piece))


def _slopes(logits: Tensor, labels: Tensor, losses: Tensor, work: _Work) -> Tensor:
    """Fill in the losses; return the gradient of their sum by the logits, in whose memory it may lie."""
    if work.part is not None:
        return part_slopes(logits, labels, losses, work.part, ignore_index=work.ignore_index, writes=work.is_trained)
    code = gpu_code(logits)
    if code is not None and logits.dtype is not torch.float64:
        code.cross_entropy_(logits, labels, losses, ignore_index=work.ignore_index, writes=work.is_trained)
        return logits
    return plain_slopes(logits, labels, losses, ignore_index=work.ignore_index, writes=work.is_trained)


def plain_slopes(logits: Tensor, labels: Tensor, losses: Tensor, *, ignore_index: int, writes: bool) -> Tensor:
    """The losses and the gradient by the logits in plain torch, with one wide copy of the logits."""
    wide = logits.to(losses.dtype, copy=True)
    counts = (labels != ignore_index).unsqueeze(1)
    places = labels.unsqueeze(1).masked_fill(~counts, 0)
    at_label = wide.gather(1, places)
    largest = wide.amax(1, keepdim=True)
    total = wide.sub_(largest).exp_().sum(1, keepdim=True)
    losses.copy_((largest + total.log() - at_label).masked_fill_(~counts, 0.0).squeeze(1))
    if not writes:
        return logits
    slopes = wide.div_(total).scatter_add_(1, places, -torch.ones_like(at_label))
    return slopes.masked_fill_(~counts, 0.0).to(logits.dtype)


def part_slopes(
    logits: Tensor, labels: Tensor, losses: Tensor, part: VocabularyPart, *, ignore_index: int, writes: bool
) -> Tensor:
    """`plain_slopes` of the logits that this rank makes: two exchanges of one or two numbers for each token."""
    wide = logits.to(losses.dtype, copy=True)
    counts = (labels != ignore_index).unsqueeze(1)
    local = (labels - part.start).unsqueeze(1)
    here = counts & (local >= 0) & (local < part.stop - part.start)
    places = local.masked_fill(~here, 0)
    at_label = wide.gather(1, places).masked_fill_(~here, 0.0)
    largest = part.largest(wide.amax(1, keepdim=True))
    total = wide.sub_(largest).exp_().sum(1, keepdim=True)
    total, at_label = part.total(torch.cat([total, at_label], 1)).chunk(2, 1)
    losses.copy_((largest + total.log() - at_label).masked_fill_(~counts, 0.0).squeeze(1))
    if not writes:
        return logits
    slopes = wide.div_(total).scatter_add_(1, places, -here.to(wide.dtype))
    return slopes.masked_fill_(~counts, 0.0).to(logits.dtype)


def _multiplied(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype of the factor, which is wide: rounded to that of the gradient, it would be wrong for all of it."""
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
