"""Collectives of units whose messages are quantized: ZeRO++'s qwZ and qgZ, with LoCo's error feedback.

Every rank, the owner included, computes with what the others get to see.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mizzen.comm import collectives
from mizzen.kernels.quantize import pack, unpack
from mizzen.parallel.zero.full.wires import Gather, Pending
from mizzen.parallel.zero.reduce import Finish, Reducer, Reduction, sum_of_rows, wait_for
from mizzen.parallel.zero.stock import Stock

WEIGHT_BITS = 8
GRADIENT_BITS = 4


@dataclass(frozen=True, slots=True)
class Quantizing:
    """What is quantized, as plain values of the plan."""

    weights: bool = False
    gradients: bool = False
    feedback: tuple[float, int] | None = None
    """The share of the old error in the running one, and the steps after which it starts again from zero."""
    frozen: bool = False
    """Whether frozen weights rest, and travel, in blocks."""

    def __str__(self) -> str:
        kept = " with error feedback" if self.feedback else ""
        words = {
            f"{WEIGHT_BITS}-bit weights": self.weights,
            f"{WEIGHT_BITS}-bit frozen weights": self.frozen,
            f"{GRADIENT_BITS}-bit gradients{kept}": self.gradients,
        }
        return " and ".join(word for word, is_on in words.items() if is_on)


class QuantizedGather(Gather):
    """Shards travel as 8-bit blocks."""

    def start(self, whole: Tensor, shard: Tensor, group: ProcessGroup) -> Pending | None:
        """Let it begin; the result is there when it was waited for."""
        ranks, count = whole.numel() // shard.numel(), shard.numel()
        message = pack(shard.view(1, -1), WEIGHT_BITS).view(-1)
        received = message.new_empty(ranks * message.numel())
        tag = self.place.tag(self.unit)
        work = collectives.all_gather_into_tensor(received, message, group=group, async_op=True, tag=tag)

        def finish() -> None:
            whole.view(ranks, -1).copy_(unpack(received.view(ranks, -1), count, WEIGHT_BITS))

        return Pending(work, finish) if work is not None else None


class QuantizedReducer(Reducer):
    """Gradients travel as 4-bit blocks, and are summed in fp32 in the order of the ranks."""

    def __init__(
        self,
        reduction: Reduction,
        group: ProcessGroup | None,
        stock: Stock,
        quantizing: Quantizing,
        step: Callable[[], int],
    ) -> None:
        super().__init__(reduction, group, stock)
        self.feedback = quantizing.feedback
        self.step = step
        self.errors: dict[int, Tensor] = {}
        """What was lost of the messages of each chunk, by the place of the chunk."""

    def to_owner(self, bucket: Tensor, chunk: Tensor, *, add: bool, owner: int | None = None) -> Finish:
        """The sum of this rank's chunk of the bucket, put into `chunk` or added to it."""
        if owner is not None:
            raise AssertionError("a unit has no single owner")
        ranks, count = self.reduction.ranks, chunk.numel()
        rows = bucket.view(ranks, -1).float()
        if self.reduction.before != 1:
            rows = rows * self.reduction.before
        sent = self._message(rows, chunk)
        received = torch.empty_like(sent)
        work = collectives.all_to_all_single(received.view(-1), sent.view(-1), group=self.group, async_op=True)

        def finish() -> None:
            wait_for(work)
            total = sum_of_rows(unpack(received, count, GRADIENT_BITS))
            if add:
                chunk.add_(total.to(chunk.dtype), alpha=self.reduction.after)
            else:
                chunk.copy_(total.mul_(self.reduction.after))

        return finish

    def _message(self, rows: Tensor, chunk: Tensor) -> Tensor:
        if self.feedback is None:
            return pack(rows, GRADIENT_BITS)
        share, period = self.feedback
        error = self.errors.get(chunk.data_ptr())
        if error is None or self.step() % period == 0:
            error = torch.zeros_like(rows, dtype=torch.bfloat16)
        rows = rows + error
        sent = pack(rows, GRADIENT_BITS)
        lost = rows - unpack(sent, rows.shape[1], GRADIENT_BITS)
        self.errors[chunk.data_ptr()] = (error.float() * share).add_(lost, alpha=1 - share).bfloat16()
        return sent
