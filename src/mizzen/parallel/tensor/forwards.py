"""What layers do whose matrices are cut: each stands in the place of a layer's `forward`, and exchanges.

A layer keeps its class and its name; its weight is this rank's part. What the layers of a region have in common is in
one `CutRegion`: the first of them that reads a tensor brings it in, and the others take it from there, so that its
gradient is summed over the ranks once.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn import functional

from mizzen.comm import collectives
from mizzen.errors import UsageError
from mizzen.parallel.tensor.cuts import LayerCut
from mizzen.parallel.tensor.exchange import copy_in, gather_along, split_along, sum_out
from mizzen.parallel.tensor.layers import local_ids
from mizzen.parallel.tensor.rng import differing
from mizzen.parallel.tensor.sequence import Gathered, SequenceParts

CHUNKS: Final = 4
"""Of a product whose sum over ranks goes on while it is computed."""


class CutRegion:
    """Between the first layers of a region and the last: activations are cut, and random numbers differ by rank.

    They begin to differ with the last of the layers that bring something in: until then, what is drawn may be for
    something that all ranks have alike, such as the dropout of an adapter.
    """

    def __init__(self, group: ProcessGroup, *, is_random: bool, sequence: SequenceParts | None = None) -> None:
        self.group, self._is_random, self._sequence = group, is_random, sequence
        self.gathered: Gathered | None = None
        """What was brought in, where it was put together of parts of a sequence."""
        self._given: Tensor | None = None
        self._inside: Tensor | None = None
        self._apart: AbstractContextManager[None] | None = None

    def enter(self, given: Tensor, *, is_last: bool) -> Tensor:
        """Bring a tensor in that all ranks have alike."""
        if given is not self._given:
            self.gathered = None if self._sequence is None else self._sequence.read(given)
            self._inside = copy_in(given, self.group) if self.gathered is None else self.gathered.whole
            self._given = given
        if is_last and self._is_random and self._apart is None:
            self._apart = differing(self.group)
            self._apart.__enter__()
        inside = self._inside
        return given if inside is None else inside

    def total(self, found: Tensor) -> Tensor:
        """The sum of what the ranks bring, of all tokens or of those that this rank has."""
        return sum_out(found, self.group) if self._sequence is None else self._sequence.leave(found)

    def leave(self) -> None:
        """The last layer of the region was called."""
        self._given = self._inside = self.gathered = None
        if self._apart is not None:
            self._apart.__exit__(None, None, None)
            self._apart = None


def close_regions(module: nn.Module, regions: Collection[CutRegion]) -> None:
    """Leave at the end of each call of the module, also of one that fails, whatever regions it has not left."""

    def close(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            for region in regions:
                region.leave()

    module.register_forward_hook(close, always_call=True)


class CutForward:
    """In a layer's own `__dict__`, under the name `forward`; it stays when the engine ends, as weights stay parts."""

    def __init__(self, layer: nn.Module, cut: LayerCut, region: CutRegion) -> None:
        self.__wrapped__ = layer.forward  # where inspect.signature looks
        self.layer: Any = layer
        self.region, self.gathers, self.splits = region, cut.gathers, cut.splits
        self.runs, self.is_last = cut.runs, cut.is_last
        self.is_transposed = cut.is_transposed

    def product(self, given: Tensor, bias: Tensor | None) -> Tensor:
        """With this rank's part of the weight."""
        weight: Tensor = self.layer.weight
        if not self.is_transposed:
            return functional.linear(given, weight, bias)
        found = given @ weight
        return found if bias is None else found + bias


class ColumnForward(CutForward):
    """Outputs are cut."""

    def __init__(self, layer: nn.Module, cut: LayerCut, region: CutRegion) -> None:
        super().__init__(layer, cut, region)
        by_rank = list(zip(*cut.runs, strict=True))
        self.sizes = [sum(parts) for parts in by_rank]
        """Of the outputs of each rank, which are its parts of all runs."""
        self.parts = [size for parts in by_rank for size in parts]

    def __call__(self, input: Tensor) -> Tensor:
        """This rank's outputs, or all of them where they are gathered."""
        region = self.region
        entered, gathered = region.enter(input, is_last=self.is_last), region.gathered
        if not self.gathers:
            return self._own(entered, gathered)
        try:
            found = self._own(entered, gathered)
        finally:
            region.leave()
        whole = gather_along(found, -1, region.group, self.sizes)
        runs = len(self.runs)
        if runs == 1:
            return whole
        parts = torch.split(whole, self.parts, -1)
        return torch.cat([part for run in range(runs) for part in parts[run::runs]], -1)

    def _own(self, entered: Tensor, gathered: Gathered | None) -> Tensor:
        if gathered is None or _is_left_to_torch(entered):
            return self.product(entered, self.layer.bias)
        return gathered.product(self.layer.weight, self.layer.bias, is_transposed=self.is_transposed)


class RowForward(CutForward):
    """Inputs are cut; what the ranks find is summed, and the bias added once."""

    def __init__(self, layer: nn.Module, cut: LayerCut, region: CutRegion, *, overlaps: bool) -> None:
        super().__init__(layer, cut, region)
        self.overlaps = overlaps

    def __call__(self, input: Tensor) -> Tensor:
        """The outputs, which all ranks have alike."""
        if self.splits:
            input = split_along(input, -1, self.region.group, self.runs[0])
        is_over = True
        try:
            found = self._summed(input)
            is_over = self.is_last
        finally:  # a block that is computed again ends by an exception, here, once all that backward needs is there
            if is_over:
                self.region.leave()
        bias = self.layer.bias
        return found if bias is None else found + bias

    def _summed(self, input: Tensor) -> Tensor:
        if not self.overlaps or _is_left_to_torch(input):
            return self.region.total(self.product(input, None))
        weight = self.layer.weight if self.is_transposed else self.layer.weight.T
        found: Tensor = OverlappedProduct.apply(input, weight, self.region.group)  # type: ignore[no-untyped-call]
        return found


def _is_left_to_torch(given: Tensor) -> bool:
    """Whether a compiler, or autocast, is to see plain products."""
    return torch.compiler.is_compiling() or torch.is_autocast_enabled(given.device.type)


class OverlappedProduct(Function):
    """A product that is summed over the ranks chunk by chunk: one is on its way while the next is computed."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
        """Rows of the product, in `CHUNKS` chunks."""
        ctx.save_for_backward(given, weight)
        rows = given.reshape(-1, given.shape[-1])
        found = rows.new_empty(len(rows), weight.shape[1])
        chunks = list(zip(rows.chunk(CHUNKS), found.chunk(CHUNKS), strict=True))
        waits = []
        for part, place in chunks:
            torch.mm(part, weight, out=place)
            waits.append(collectives.all_reduce(place, group=group, async_op=True))
        for wait in waits:
            if wait is not None:
                wait.wait()
        return found.view(*given.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Each rank has all of the gradient."""
        given, weight = ctx.saved_tensors
        gradient = grads[0].reshape(-1, weight.shape[1])
        by_given = (gradient @ weight.T).view(given.shape) if ctx.needs_input_grad[0] else None
        by_weight = given.reshape(-1, given.shape[-1]).T @ gradient if ctx.needs_input_grad[1] else None
        return by_given, by_weight, None


class TableForward(CutForward):
    """A table that is looked up; some of transformers' scale what was found."""

    def scaled(self, found: Tensor) -> Tensor:
        """As the class of the table does it."""
        scale = dict(self.layer.named_buffers(recurse=False)).get("embed_scale", vars(self.layer).get("embed_scale"))
        return found if scale is None else found * (scale.to(found.dtype) if isinstance(scale, Tensor) else scale)


class TableRowsForward(TableForward):
    """Rows of a table, such as the tokens of a vocabulary, are shared out: each rank looks up those that it has."""

    def __init__(self, layer: nn.Module, cut: LayerCut, region: CutRegion, rank: int) -> None:
        super().__init__(layer, cut, region)
        sizes = cut.runs[0]
        self.start, self.stop = sum(sizes[:rank]), sum(sizes[: rank + 1])
        padding = self.layer.padding_idx
        self.padding = padding - self.start if padding is not None and self.start <= padding < self.stop else None

    def __call__(self, input: Tensor, *more: Any, **settings: Any) -> Tensor:
        """The rows, which all ranks have alike."""
        if more or settings:
            raise UsageError("a table that is cut over tensor-parallel ranks takes indices and nothing else")
        places, is_elsewhere = local_ids(input, self.start, self.stop)
        rows = functional.embedding(places, self.layer.weight, self.padding)
        return self.scaled(sum_out(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), self.region.group))


class TableColumnsForward(TableForward):
    """Columns of a table are shared out: a number for each head, or features that are gathered."""

    def __call__(self, input: Tensor) -> Tensor:
        """This rank's columns, or all of them."""
        found = functional.embedding(input, self.layer.weight, self.layer.padding_idx)
        return self.scaled(gather_along(found, -1, self.region.group, self.runs[0]) if self.gathers else found)


class TailForward(CutForward):
    """A layer that is whole, of which the last outputs go where activations are cut, and the others do not."""

    def __init__(self, layer: nn.Module, cut: LayerCut, region: CutRegion) -> None:
        super().__init__(layer, cut, region)
        self.tail = cut.summed_tail

    def __call__(self, input: Tensor) -> Tensor:
        """All outputs."""
        found = self.product(input, self.layer.bias)
        first, last = torch.split(found, [found.shape[-1] - self.tail, self.tail], -1)
        return torch.cat([first, copy_in(last, self.region.group)], -1)


def set_sizes(layer: Any, cut: LayerCut, shape: Sequence[int]) -> None:
    """Let the numbers that a layer has of itself be those of its part."""
    rows, columns = shape
    outputs, inputs = (columns, rows) if cut.is_transposed else (rows, columns)
    names = {"out_features": outputs, "in_features": inputs, "nf": outputs, "nx": inputs}
    for name, size in names.items():
        if isinstance(vars(layer).get(name), int):
            vars(layer)[name] = size
