"""What is quantized of units: messages (ZeRO++'s qwZ and qgZ, with LoCo's error feedback) and frozen weights at rest.

Every rank, the owner included, computes with what the others get to see. A frozen shard that rests in 8-bit blocks
(`zero_quantized_nontrainable_weights`, for the base of an adapter) is kept as the bytes that travel, and comes to life
after the gather. Whoever else reads such a shard gets its values.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mizzen.comm import collectives, groups
from mizzen.comm.backend import Tag
from mizzen.comm.communicator import Work
from mizzen.kernels.quantize import BLOCK, message_size, pack, unpack
from mizzen.model.inputs import change_tensors
from mizzen.model.sketch import ParameterSketch
from mizzen.model.wrapper import without_memory
from mizzen.parallel.zero.full.sharded_parameter import shard_dim
from mizzen.parallel.zero.reduce import Finish, Reducer, Reduction, sum_of_rows, wait_for
from mizzen.parallel.zero.stock import Stock
from mizzen.precision.policy import FLOATING

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
    inside: int = 0
    """Ranks of a node, among which gradients are summed before they leave it; 0 sends them all in one hop."""

    def __str__(self) -> str:
        kept = f" in two hops, the first among {self.inside} ranks" if self.inside else ""
        kept += " with error feedback" if self.feedback else ""
        words = {
            f"{WEIGHT_BITS}-bit weights": self.weights,
            f"{WEIGHT_BITS}-bit frozen weights": self.frozen,
            f"{GRADIENT_BITS}-bit gradients{kept}": self.gradients,
        }
        return " and ".join(word for word, is_on in words.items() if is_on)


def gather_rows(rows: Tensor, mine: Tensor, group: ProcessGroup, tag: Tag | None) -> Finish:
    """Start to gather the shards of all ranks as they are."""
    return _finish_of(collectives.all_gather_into_tensor(rows, mine, group=group, async_op=True, tag=tag))


def gather_quantized(rows: Tensor, mine: Tensor, group: ProcessGroup, tag: Tag | None) -> Finish:
    """Start to gather the shards of all ranks as 8-bit blocks; bytes are blocks already."""
    if not mine.is_floating_point():
        return gather_rows(rows, mine, group, tag)
    ranks, count = rows.numel() // mine.numel(), mine.numel()
    message = pack(mine.view(1, -1), WEIGHT_BITS).view(-1)
    received = message.new_empty(ranks * message.numel())
    finish = _finish_of(collectives.all_gather_into_tensor(received, message, group=group, async_op=True, tag=tag))

    def finish_and_unpack() -> None:
        finish()
        rows.view(ranks, -1).copy_(unpack(received.view(ranks, -1), count, WEIGHT_BITS))

    return finish_and_unpack


def _finish_of(work: Work | None) -> Finish:
    return lambda: wait_for(work)


class QuantizedReducer(Reducer):
    """Gradients travel as 4-bit blocks, and are summed in fp32 in the order of the ranks.

    [Note: two hops]
    Rank (node, place) of `nodes` x `inside` ranks is to get row (node, place) of everybody. In one hop each rank sends
    a row to each other rank. In two, it first sends to each rank of its own node the rows of that rank's place, one for
    every node; these are summed, quantized again and sent to the ranks of the same place in other nodes. So a link
    between nodes carries one row for `inside` of them. Both are exchanges in the group of all, most of whose parts are
    empty: no further groups are needed.
    """

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
        self.inside = quantizing.inside or reduction.ranks
        self.step = step
        self.errors: dict[tuple[str, int], Tensor] = {}
        """What was lost of the messages of each chunk, by the title of the chunk and the hop."""

    def forget(self) -> None:
        """Owe nothing: what was lost of gradients that are not stepped with, and of any that are not finite."""
        self.errors.clear()

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
        """The sum of this rank's chunk of the bucket, put into `chunk` or added to it."""
        if owner is not None:
            raise AssertionError("a unit has no single owner")
        count = chunk.numel()
        nodes = self.reduction.ranks // self.inside
        rows = bucket.view(self.reduction.ranks, -1).float()
        if self.reduction.before != 1:
            rows = rows * self.reduction.before
        # By receiver: the rows of one place in all nodes lie together.
        rows = rows.view(nodes, self.inside, count).transpose(0, 1).reshape(-1, count)
        received, work = self._exchange(self._message(rows, title, 0), self._neighbours(), tag)

        def finish() -> None:
            wait_for(work)
            total = sum_of_rows(unpack(received, count, GRADIENT_BITS).view(self.inside, nodes, count))
            if nodes > 1:
                incoming, last = self._exchange(self._message(total, title, 1), self._counterparts())
                wait_for(last)
                total = sum_of_rows(unpack(incoming, count, GRADIENT_BITS))
            total = total.view(-1)
            if add:
                chunk.add_(total.to(chunk.dtype), alpha=self.reduction.after)
            else:
                chunk.copy_(total.mul_(self.reduction.after))

        return finish

    def _neighbours(self) -> list[int]:
        """The ranks of this rank's node."""
        first = groups.get_rank(self.group) // self.inside * self.inside
        return list(range(first, first + self.inside))

    def _counterparts(self) -> list[int]:
        """The ranks of the same place in all nodes."""
        return list(range(groups.get_rank(self.group) % self.inside, self.reduction.ranks, self.inside))

    def _exchange(self, messages: Tensor, ranks: Sequence[int], tag: Tag | None = None) -> tuple[Tensor, Work | None]:
        """Send some ranks their rows, as many to each, and get theirs."""
        each = messages.numel() // len(ranks)
        sizes = [each if rank in ranks else 0 for rank in range(self.reduction.ranks)]
        received = torch.empty_like(messages)
        work = collectives.all_to_all_single(
            received.view(-1), messages.view(-1), sizes, sizes, group=self.group, async_op=True, tag=tag
        )
        return received, work

    def _message(self, rows: Tensor, title: str, hop: int) -> Tensor:
        if self.feedback is None:
            return pack(rows, GRADIENT_BITS)
        share, period = self.feedback
        key = title, hop
        error = self.errors.get(key)
        if error is None or self.step() % period == 0:
            error = torch.zeros_like(rows, dtype=torch.bfloat16)
        rows = rows + error
        sent = pack(rows, GRADIENT_BITS)
        lost = rows - unpack(sent, rows.shape[1], GRADIENT_BITS)
        self.errors[key] = (error.float() * share).add_(lost, alpha=1 - share).bfloat16()
        return sent


def is_packed(parameter: ParameterSketch, ranks: int) -> bool:
    """Whether a parameter rests in blocks: a frozen matrix that is cut by rows, of which a rank has a block or more.

    Vectors are left alone: they are small, and a norm's weight is what a block's scale would hurt most.
    """
    return (
        not parameter.requires_grad
        and parameter.dtype in FLOATING
        and len(parameter.shape) > 1
        and shard_dim(parameter.shape, ranks) == 0
        and parameter.numel >= BLOCK * ranks
    )


def packed_bytes(count: int) -> int:
    """The size of a shard of so many elements."""
    return message_size(count, WEIGHT_BITS)


class Packed(Tensor):
    """A shard in blocks that reads as what it stands for, and is written to with `copy_`."""

    held: Tensor
    """The bytes: of all elements of a shard, padding included."""
    count: int
    """How many elements these are."""

    def __new__(cls, held: Tensor, count: int, shape: Sequence[int], dtype: torch.dtype) -> "Packed":
        """As large as this rank's own shard, which may be without padding."""
        made: Packed = without_memory(cls, shape, dtype=dtype, device=held.device)
        made.held, made.count = held, count
        return made

    def __init__(self, *_: Any) -> None:
        """Everything was done in `__new__`."""

    @classmethod
    def of(cls, padded: Tensor, shape: Sequence[int]) -> "Packed":
        """The first elements of a flat tensor, as many as this shape has."""
        return cls(pack(padded.view(1, -1), WEIGHT_BITS).view(-1), padded.numel(), shape, padded.dtype)

    def values(self) -> Tensor:
        """What it stands for."""
        flat = unpack(self.held.view(1, -1), self.count, WEIGHT_BITS).reshape(-1)
        return flat[: self.shape.numel()].to(self.dtype).view(self.shape)

    def write(self, values: Tensor) -> None:
        """Stand for other values."""
        padded = values.new_zeros(self.count)
        padded[: values.numel()] = values.reshape(-1)
        self.held.copy_(pack(padded.view(1, -1), WEIGHT_BITS).view(-1))

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of the bytes."""
        return self.held.untyped_storage()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Results are plain."""
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub leaves `func` out
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute with the values; what is written to them is packed again."""
        first = args[0] if args else None
        if isinstance(first, Packed) and _is_itself(func, first, args):
            return Packed(first.held, first.count, first.shape, first.dtype)
        plain, keywords = change_tensors((tuple(args), dict(kwargs or {})), _plain)
        found = func(*plain, **keywords)
        if isinstance(first, Packed) and func._schema.is_mutable:
            first.write(plain[0])
            return first
        return found

    def unpacked(self, messages: Tensor) -> Tensor:
        """The elements of the whole parameter out of everybody's bytes, one row for each rank, padding included."""
        return unpack(messages.contiguous(), self.count, WEIGHT_BITS).reshape(-1)


def _is_itself(func: Any, packed: Packed, args: Sequence[Any]) -> bool:
    """Whether all that is asked for is another object with the same content."""
    aten = torch.ops.aten
    return func in (aten.detach.default, aten.alias.default) or (
        func is aten.view.default and list(args[1]) == list(packed.shape)
    )


def _plain(tensor: Tensor) -> Tensor:
    return tensor.values() if isinstance(tensor, Packed) else tensor
