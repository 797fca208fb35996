"""Linear layers and embeddings of which each tensor-parallel rank has a part, for models that are written with them.

A layer's weight is drawn as a whole, from a seed that all ranks have alike, and each rank keeps its part: any number of
ranks gives the same model. The part is a plain parameter that says what it is in Megatron's attributes, from which a
plan knows where it lives (parallel/given.py). Megatron's signatures are in `mizzen.tensor`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from mizzen.errors import UsageError
from mizzen.model.home import evenly
from mizzen.parallel.tensor.exchange import (
    copy_in,
    gather_along,
    gather_sequence,
    scatter_sequence,
    split_along,
    sum_out,
)
from mizzen.parallel.tensor.rng import drawn_seed, seeded

Fill = Callable[[Tensor], Any]


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """What layers that are cut have in common."""

    group: ProcessGroup | None = None
    """The ranks that share a matrix; None is this rank alone."""
    fill: Fill = nn.init.xavier_normal_
    """Fills a whole weight."""
    dtype: torch.dtype | None = None
    device: Any = None
    name: str | None = None
    """With a name, weights follow from the seed and the name; without one from the random numbers of the process."""
    seed: int | None = None
    """Beside a name; None is torch's initial seed."""
    stride: int = 1
    """In how many runs a cut dimension is: 3 where Q, K and V are in one matrix. Each rank has a part of each."""
    sequence_dim: int | None = None
    """The dimension along which activations outside of the layers are cut; None where every rank has all of them."""

    @property
    def ranks(self) -> int:
        """How many ranks share a matrix."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """The place of this rank among them."""
        return 0 if self.group is None else self.group.rank()

    def parts(self, size: int, what: str) -> tuple[int, ...]:
        """The sizes of the parts of a run of a dimension, by torch.chunk's rule."""
        if self.stride < 1 or size % self.stride:
            raise UsageError(f"{what}={size} is not {self.stride} runs (stride) of as many each")
        found = evenly(size // self.stride, self.ranks)
        if 0 in found:
            raise UsageError(
                f"{what}={size} leaves some of {self.ranks} tensor-parallel ranks without a part (the parts of a run "
                f"would be {list(found)}): use fewer ranks, or a larger layer"
            )
        return found

    def parameter(self, title: str, shape: Sequence[int], dim: int | None, fill: Fill) -> nn.Parameter:
        """This rank's part of a parameter that is filled as a whole; without a dimension it is all of it."""
        start = (self.name, self.seed if self.seed is not None else torch.initial_seed(), title)
        whole = torch.empty(*shape, dtype=self.dtype, device=self.device)
        with seeded(*(start if self.name is not None else (drawn_seed(),))), torch.no_grad():
            fill(whole)
        made = nn.Parameter(whole)
        if dim is not None:
            self.keep_part(made, dim, title)
        return made

    def keep_part(self, parameter: nn.Parameter, dim: int, title: str, runs: Sequence[int] = ()) -> None:
        """Let a whole parameter be this rank's part of it along a dimension, and say so; `runs` are not of one size."""
        size = parameter.shape[dim]
        every = self.parts_of_runs(size, title, runs)
        if self.ranks > 1:
            whole = torch.split(parameter.data, [sum(sizes) for sizes in every], dim)
            own = [torch.split(run, list(sizes), dim)[self.rank] for run, sizes in zip(whole, every, strict=True)]
            parameter.data = torch.cat(own, dim)
        mark_cut(parameter, dim, size, self.stride)
        if runs:
            vars(parameter)["partition_runs"] = tuple(runs)

    def parts_of_runs(self, size: int, what: str, runs: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """For each run of a dimension the sizes of its parts."""
        if not runs:
            return [self.parts(size, what)] * self.stride
        return [replace(self, stride=1).parts(run, what) for run in runs]


def mark_cut(parameter: nn.Parameter, dim: int, size: int, stride: int = 1) -> None:
    """Say of a parameter that it is this rank's part along a dimension, which has `size` altogether."""
    said = {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": stride, "partition_size": size}
    vars(parameter).update(said)


def mark_sequence_parallel(*modules: nn.Module | nn.Parameter) -> None:
    """Say of parameters that ranks apply them to different parts of a sequence: their gradients are summed over tp.

    For norms, and biases outside of the cut layers, where activations between these are cut along the sequence.
    """
    for module in modules:
        for parameter in module.parameters() if isinstance(module, nn.Module) else [module]:
            vars(parameter)["sequence_parallel"] = True


class ColumnCutLinear(nn.Module):
    """A linear layer each of whose ranks has some of the output features."""

    def __init__(
        self,
        sizes: tuple[int, int],
        options: LayerOptions,
        *,
        bias: bool = True,
        gather_output: bool = True,
        skip_bias_add: bool = False,
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = sizes
        self.options, self.gather_output, self.skip_bias_add = options, gather_output, skip_bias_add
        self.parts = options.parts(self.output_size, "output_size")
        if gather_output and options.stride > 1:
            raise UsageError(
                f"gather_output with stride={options.stride}: the gathered output would have the runs of each rank "
                "one after the other; leave gather_output out, and split the runs of a rank"
            )
        self.output_size_per_partition = options.stride * self.parts[options.rank]
        self.weight = options.parameter("weight", (self.output_size, self.input_size), 0, options.fill)
        self.bias = options.parameter("bias", (self.output_size,), 0, nn.init.zeros_) if bias else None

    def forward(self, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The output, of which this rank has a part unless it is gathered, and the bias that was not added."""
        dim, group = self.options.sequence_dim, self.options.group
        entered = copy_in(x, group) if dim is None else gather_sequence(x, dim, group)
        added, left = (None, self.bias) if self.skip_bias_add else (self.bias, None)
        output = functional.linear(entered, self.weight if weight is None else weight, added)
        return gather_along(output, -1, group, self.parts) if self.gather_output else output, left

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"{self.input_size}, {self.output_size} over tp={self.options.ranks}, bias={self.bias is not None}"


class RowCutLinear(nn.Module):
    """A linear layer each of whose ranks has the weights of some of the input features; their outputs are summed."""

    def __init__(
        self,
        sizes: tuple[int, int],
        options: LayerOptions,
        *,
        bias: bool = True,
        input_is_parallel: bool = False,
        skip_bias_add: bool = False,
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = sizes
        self.options, self.input_is_parallel, self.skip_bias_add = options, input_is_parallel, skip_bias_add
        self.parts = options.parts(self.input_size, "input_size")
        if options.sequence_dim is not None and not input_is_parallel:
            raise UsageError(
                "sequence_parallel with input_is_parallel=False: what comes in would be cut along the sequence and "
                "along the features; let the layer before leave its output cut (gather_output=False)"
            )
        self.input_size_per_partition = options.stride * self.parts[options.rank]
        self.weight = options.parameter("weight", (self.output_size, self.input_size), 1, options.fill)
        self.bias = options.parameter("bias", (self.output_size,), None, nn.init.zeros_) if bias else None
        if self.bias is not None and options.sequence_dim is not None:
            mark_sequence_parallel(self.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output, of which this rank has a part of the sequence where that is cut, and the bias not added."""
        dim, group = self.options.sequence_dim, self.options.group
        own = x if self.input_is_parallel else split_along(x, -1, group, self.parts)
        partial = functional.linear(own, self.weight)
        output = sum_out(partial, group) if dim is None else scatter_sequence(partial, dim, group)
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias, None

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"{self.input_size} over tp={self.options.ranks}, {self.output_size}, bias={self.bias is not None}"


class VocabCutEmbedding(nn.Module):
    """An embedding each of whose ranks has some rows of the table; the last one may have fewer."""

    def __init__(self, sizes: tuple[int, int], options: LayerOptions) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = sizes
        self.options = replace(options, stride=1)
        self.parts = self.options.parts(self.num_embeddings, "num_embeddings")
        self.vocab_start_index = sum(self.parts[: options.rank])
        self.vocab_end_index = self.vocab_start_index + self.parts[options.rank]
        self.weight = self.options.parameter("weight", sizes, 0, options.fill)

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of these ids, of which this rank has a part of the sequence where that is cut."""
        dim, group = self.options.sequence_dim, self.options.group
        if not torch.compiler.is_compiling() and ids.device.type == "cpu" and ids.numel():
            self._check(ids)
        own, is_elsewhere = local_ids(ids, self.vocab_start_index, self.vocab_end_index)
        rows = functional.embedding(own, self.weight)
        if self.options.ranks > 1:
            rows = rows.masked_fill(is_elsewhere.unsqueeze(-1), 0)
        return sum_out(rows, group) if dim is None else scatter_sequence(rows, dim, group)

    def _check(self, ids: Tensor) -> None:
        low, high = (int(each) for each in torch.aminmax(ids))
        if low < 0 or high >= self.num_embeddings:
            raise UsageError(
                f"token ids from {low} to {high} for an embedding of {self.num_embeddings}: ids are at least 0 and "
                "less than that"
            )

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"{self.num_embeddings} over tp={self.options.ranks}, {self.embedding_dim}"


def local_ids(ids: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Ids as places in this rank's rows, 0 where another rank has them; and which of them those are."""
    is_elsewhere = (ids < start) | (ids >= stop)
    return (ids - start).masked_fill(is_elsewhere, 0), is_elsewhere


def vocab_logits(
    hidden: Tensor,
    weight: Tensor,
    group: ProcessGroup | None,
    *,
    bias: Tensor | None = None,
    gather_output: bool = False,
    sequence_dim: int | None = None,
) -> Tensor:
    """Logits of a head whose rows are cut, such as an embedding's that is tied to it; this rank's unless gathered."""
    entered = copy_in(hidden, group) if sequence_dim is None else gather_sequence(hidden, sequence_dim, group)
    logits = functional.linear(entered, weight, bias)
    if not gather_output:
        return logits
    size = vars(weight).get("partition_size")
    sizes = evenly(size, group.size()) if size is not None and group is not None else None
    return gather_along(logits, -1, group, sizes)
