"""How the gradients of one bucket are summed over the data-parallel ranks. Which bucket and when is decided elsewhere.

A call starts the sum and returns the call that finishes it, so that backward can go on in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mizzen.comm import collectives, groups
from mizzen.comm.backend import Tag
from mizzen.comm.communicator import Work
from mizzen.parallel.zero.stock import Stock

Finish = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Reduction:
    """What happens to a gradient on its way, as plain values of the plan."""

    ranks: int
    dtype: str | None = None
    """On the wire; None is float32, or the gradient's own dtype where that is wider."""
    before: float = 1.0
    """Factor applied by each rank before the sum."""
    is_early: bool = field(default=False, kw_only=True)
    """Whether that was done by whoever put the bucket together, as gradients were copied."""
    after: float = 1.0
    """Factor applied to the sum."""
    in_rank_order: bool = False
    """Sum in the order of the ranks, which gives the same bits wherever an element lies."""


class Reducer:
    """Sums buckets over one process group."""

    def __init__(self, reduction: Reduction, group: ProcessGroup | None, stock: Stock) -> None:
        self.reduction = reduction
        self.group = group
        self.stock = stock

    def forget(self) -> None:
        """What was sent since the last step is not stepped with. Only messages that lose something remember it."""

    def to_all(self, bucket: Tensor) -> Finish:
        """Every rank gets the sum, in place."""
        if self.reduction.ranks == 1:
            return _nothing
        if self.reduction.in_rank_order:
            return self._to_all_in_rank_order(bucket)
        sent = self._sent(bucket)
        work = collectives.all_reduce(sent, group=self.group, async_op=True)

        def finish() -> None:
            wait_for(work)
            self._scale(sent)  # before the cast: a sum may be beyond a dtype that holds its mean
            if sent is not bucket:
                bucket.copy_(sent)

        return finish

    def to_owner(
        self,
        bucket: Tensor,
        chunk: Tensor,
        *,
        add: bool,
        owner: int | None = None,
        title: str = "",
        tag: Tag | None = None,
    ) -> Finish:
        """The sum of this rank's chunk of the bucket, put into `chunk` or added to it; the bucket itself is kept.

        A bucket that has one owner goes to that rank, and the chunks of the others are empty. By the title a reducer
        may remember something of a chunk from step to step. The ranks compare the tag, if there is one.
        """
        if self.reduction.ranks == 1:
            chunk.add_(bucket) if add else chunk.copy_(bucket)
            return _nothing
        sent = self._sent(bucket)
        if self.reduction.in_rank_order or bucket.device.type == "cpu":
            # gloo's reduce-scatter takes longer than an exchange of chunks and a local sum, and its order of
            # summation depends on the place in the buffer.
            received, rows, work = self._exchanged(sent, chunk, owner, tag)
        elif owner is None:
            received = chunk if not add and chunk.dtype == sent.dtype else sent.new_empty(chunk.numel())
            work = collectives.reduce_scatter_tensor(received, sent, group=self.group, async_op=True, tag=tag)
            rows = [received]
        else:
            received = sent.clone() if sent is bucket else sent
            rows, work = [received], collectives.reduce(received, group_dst=owner, group=self.group, async_op=True)

        def finish() -> None:
            wait_for(work)
            if received is chunk:
                self._scale(chunk)
                return
            if chunk.numel():
                put()
            self.stock.give(received)

        def put() -> None:
            if self.reduction.after == 1 and received.dtype == chunk.dtype and not add:
                sum_of_rows(rows, into=chunk)
                return
            total = sum_of_rows(rows, into=received[: chunk.numel()])
            if add:
                chunk.add_(total, alpha=self.reduction.after)
            elif total.dtype == chunk.dtype:
                torch.mul(total, self.reduction.after, out=chunk)
            else:
                self._scale(total)  # before the cast: a sum may be beyond a dtype that holds its mean
                chunk.copy_(total)

        return finish

    def _exchanged(
        self, sent: Tensor, chunk: Tensor, owner: int | None, tag: Tag | None
    ) -> tuple[Tensor, list[Tensor], Work | None]:
        """What is received; and, once the work is done, every rank's share of this rank's chunk, in their order."""
        ranks = self.reduction.ranks
        if ranks == 2 and owner is None:
            return self._swapped(sent, tag)
        received = self.stock.take(chunk.numel() * ranks, sent.dtype)
        incoming = outgoing = None
        if owner is not None:
            outgoing = [sent.numel() if rank == owner else 0 for rank in range(ranks)]
            incoming = [chunk.numel()] * ranks
        work = collectives.all_to_all_single(
            received, sent, incoming, outgoing, group=self.group, async_op=True, tag=tag
        )
        return received, list(received.view(ranks, -1)), work

    def _swapped(self, sent: Tensor, tag: Tag | None) -> tuple[Tensor, list[Tensor], Work | None]:
        """An exchange between two ranks, where what is sent lies in one piece without the share that stays here."""
        rows = list(sent.chunk(2))
        other = 1 - groups.get_rank(self.group)
        sizes = [0, 0]
        sizes[other] = rows[other].numel()
        received = self.stock.take(sizes[other], sent.dtype)
        work = collectives.all_to_all_single(
            received, rows[other], sizes, sizes, group=self.group, async_op=True, tag=tag
        )
        rows[other] = received
        return received, rows, work

    def rows_to_all(self, gradient: Tensor) -> None:
        """Sum a matrix of which few rows are not zero, such as an embedding's gradient, by sending those rows only."""
        index = gradient.ne(0).any(dim=1).nonzero().squeeze(1)
        counts = [index.new_zeros(1) for _ in range(self.reduction.ranks)]
        collectives.all_gather(counts, index.new_tensor([index.numel()]), group=self.group)
        most = int(torch.stack(counts).max())
        if most == 0:
            return
        sent = self._sent(gradient[index])
        indices, rows = index.new_zeros(most), sent.new_zeros(most, gradient.shape[1])
        indices[: index.numel()], rows[: index.numel()] = index, sent
        all_indices = [torch.empty_like(indices) for _ in counts]
        all_rows = [torch.empty_like(rows) for _ in counts]
        collectives.all_gather(all_indices, indices, group=self.group)
        collectives.all_gather(all_rows, rows, group=self.group)
        gradient.zero_()
        for theirs, values in zip(all_indices, all_rows, strict=True):
            gradient.index_add_(0, theirs, values.to(gradient.dtype))
        self._scale(gradient)

    def _sent(self, bucket: Tensor) -> Tensor:
        """What goes on the wire. The factor comes before the cast: it is there to keep large sums within a dtype."""
        wire = self.reduction.dtype
        dtype = torch_dtype(wire) if wire else torch.promote_types(bucket.dtype, torch.float32)
        is_ready = self.reduction.is_early or self.reduction.before == 1
        return (bucket if is_ready else bucket * self.reduction.before).to(dtype)

    def _scale(self, tensor: Tensor) -> None:
        if self.reduction.after != 1:
            tensor.mul_(self.reduction.after)

    def _to_all_in_rank_order(self, bucket: Tensor) -> Finish:
        total = bucket.new_empty(bucket.numel() // self.reduction.ranks)
        finish_sum = self.to_owner(bucket, total, add=False)

        def finish() -> None:
            finish_sum()
            collectives.all_gather_into_tensor(bucket, total, group=self.group)

        return finish


def _nothing() -> None:
    """One rank has nothing to wait for."""


def sum_of_rows(rows: Tensor | Sequence[Tensor], into: Tensor | None = None) -> Tensor:
    """Row 0 plus row 1 plus row 2 and so on, in that order, which `sum(0)` does not promise; in the place of row 0.

    The place given for it may be that of row 0 or row 1.
    """
    total = rows[0] if into is None else into
    if len(rows) == 1:
        return total if total.data_ptr() == rows[0].data_ptr() else total.copy_(rows[0])
    torch.add(rows[0], rows[1], out=total)
    for row in rows[2:]:
        total.add_(row)
    return total


def wait_for(*works: Work | None) -> None:
    """Wait for collectives that were started; a rank outside of the group has none to wait for."""
    for work in works:
        if work is not None:
            work.wait()


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that torch calls by this name."""
    found = torch.__dict__[name]
    if not isinstance(found, torch.dtype):
        raise AssertionError(f"{name} is not a dtype")
    return found
