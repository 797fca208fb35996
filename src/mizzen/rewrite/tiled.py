"""A linear layer in tiles, which stage 3 gathers one by one: a layer may be larger than what fits at once.

Tile (i, j) makes the i-th part of the output from the j-th part of the input; parts of the output are sums over j.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mizzen.errors import UsageError, expect


class Tiled(nn.Module):
    """What `make(in_features, out_features, bias)` computes, in `splits` parts of the input and of the output.

    Features that do not divide are spread as evenly as can be. The input may come as a list of parts; the output may
    stay one. Only the last tile of a row has a bias, which is added once.
    """

    returns_bias: ClassVar[bool] = False
    """Whether layers return (output, bias) and leave the addition to whoever has called them."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        splits: tuple[int, int],
        input_is_already_split: bool,
        combine_out_splits: bool,
        make: Callable[[int, int, bool], nn.Module],
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_sizes = parts_of(in_features, self.in_splits, "in")
        self.out_sizes = parts_of(out_features, self.out_splits, "out")
        self.linears = nn.ModuleList(
            nn.ModuleList(
                make(columns, rows, bias and place == self.in_splits - 1) for place, columns in enumerate(self.in_sizes)
            )
            for rows in self.out_sizes
        )

    def forward(self, input_: Any) -> Any:
        """One output, or a list of its parts."""
        inputs = self._inputs(input_)
        outputs = []
        for row in self.linears:
            if not isinstance(row, nn.ModuleList):
                raise AssertionError(f"a row of tiles is a {type(row).__name__}")
            total = None
            for tile, part in zip(row, inputs, strict=True):
                found = tile(part)
                total = found if total is None else self._add(total, found)
            outputs.append(total)
        return self._combine(outputs) if self.combine_out_splits else outputs

    def _inputs(self, given: Any) -> Sequence[Tensor]:
        if not self.input_is_already_split:
            expect(given, Tensor, "TiledLinear: one input, unless input_is_already_split,")
            if given.shape[-1] != self.in_features:
                raise UsageError(f"TiledLinear has {self.in_features} input features; this input has {given.shape[-1]}")
            return list(torch.split(given, self.in_sizes, dim=-1))
        expect(given, list | tuple, "TiledLinear: a list of the parts of the input")
        widths = [part.shape[-1] for part in given]
        if widths != self.in_sizes:
            raise UsageError(f"TiledLinear takes its input in parts of {self.in_sizes} features; these have {widths}")
        return list(given)

    def _add(self, total: Any, more: Any) -> Any:
        if not self.returns_bias:
            return total + more
        return total[0] + more[0], more[1] if total[1] is None else total[1]

    def _combine(self, outputs: Sequence[Any]) -> Any:
        if not self.returns_bias:
            return torch.cat(list(outputs), dim=-1)
        biases = [bias for _, bias in outputs if bias is not None]
        return torch.cat([found for found, _ in outputs], dim=-1), torch.cat(biases, dim=-1) if biases else None

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Take the weight and bias of a layer that is not in tiles."""
        weight, bias = (vars(other)["_parameters"].get(name) for name in ("weight", "bias"))
        expect(weight, Tensor, f"TiledLinear: a {type(other).__name__} with a weight")
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise UsageError(
                f"TiledLinear has a weight of {[self.out_features, self.in_features]}; the other layer has one of "
                f"{list(weight.shape)}"
            )
        if (bias is not None) != self.use_bias:
            raise UsageError(
                f"TiledLinear was built with bias={self.use_bias}; the other layer has "
                f"{'a' if bias is not None else 'no'} bias"
            )
        rows = torch.split(weight, self.out_sizes)
        biases = torch.split(bias, self.out_sizes) if bias is not None else ()
        for number, row in enumerate(rows):
            for place, tile in enumerate(torch.split(row, self.in_sizes, dim=1)):
                self.get_submodule(f"linears.{number}.{place}").get_parameter("weight").copy_(tile)
            if biases:
                last = self.get_submodule(f"linears.{number}.{self.in_splits - 1}")
                last.get_parameter("bias").copy_(biases[number])

    def extra_repr(self) -> str:
        """What `print` shows beside the tiles."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"


def parts_of(features: int, splits: int, side: str) -> list[int]:
    """The sizes of so many parts, of which the first are larger by one where they have to be."""
    for value in (features, splits):
        expect(value, int, f"TiledLinear: a whole number of {side}_features and {side}_splits")
    if not 1 <= splits <= features:
        raise UsageError(f"TiledLinear with {side}_splits={splits}: give a number from 1 to {side}_features={features}")
    least, more = divmod(features, splits)
    return [least + (number < more) for number in range(splits)]
