"""The profile of a model in one call, with the wide signature that users know."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from mizzen.errors import UsageError, expect
from mizzen.profiler.flops import profile_call


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Collection[type[nn.Module]] | None = None,
    mode: Literal["forward", "generate"] = "forward",
) -> tuple[Any, Any, Any]:
    """(flops, MACs, parameters) of one forward, or of `generate`: with ones of a shape, or with given arguments.

    The model is put into evaluation for it, and back.
    """
    expect(model, nn.Module, "get_model_profile: a model")
    if mode not in ("forward", "generate"):
        raise UsageError(f"get_model_profile(mode={mode!r}): 'forward' or 'generate'")
    if (input_shape is None) == (not args and not kwargs):
        raise UsageError("get_model_profile() takes input_shape=, or args= and kwargs=: exactly one of the two")
    given = [_ones(model, input_shape)] if input_shape is not None else list(args or ())
    call: Any = model if mode == "forward" else model.generate
    run = partial(call, *given, **(kwargs or {}))
    profiler = profile_call(model, run, warm_up=warm_up, left_out=ignore_modules)
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    totals = profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params
    flops, macs, parameters = (total(as_string) for total in totals)
    return flops, macs, parameters


def _ones(model: nn.Module, shape: Sequence[int]) -> torch.Tensor:
    if not shape:
        raise UsageError("get_model_profile(input_shape=()): give the shape of the input, with its batch")
    first = next(model.parameters(), torch.empty(0))
    return torch.ones(tuple(shape), dtype=first.dtype, device=first.device)
