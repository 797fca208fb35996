"""Operations of products that torch's own registry has no formula for. A user adds one with `register_flop_formula`."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

Shape = Sequence[int]


def attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Two products: scores, and what they weigh. A causal mask takes nothing off, as everywhere in torch's registry."""
    *batch, length, width = query
    return 2 * prod(batch) * length * key[-2] * (width + value[-1])


def attention_backward(_: Shape, query: Shape, key: Shape, value: Shape, *__: Any, **___: Any) -> int:
    """Five: the scores once more, and the gradients of scores, query, key and value."""
    *batch, length, width = query
    return 2 * prod(batch) * length * key[-2] * (3 * width + 2 * value[-1])


def grouped_product(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Every row, or column, is in one group; where both sides are matrices, the groups cut what is summed over."""
    if len(left) == len(right) == 3:
        return 2 * prod(left) * right[-1]
    return 2 * left[-2] * left[-1] * right[-1]


def more_formulas() -> Mapping[Any, Callable[..., int]]:
    """By operator, those that this torch has."""
    wanted: Mapping[str, Callable[..., int]] = {
        "_scaled_dot_product_flash_attention_for_cpu": attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
        "_grouped_mm": grouped_product,
        "_scaled_grouped_mm": grouped_product,
    }
    operators = torch.ops.aten
    return {getattr(operators, name): formula for name, formula in wanted.items() if name in dir(operators)}
