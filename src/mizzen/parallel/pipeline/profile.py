"""How long each layer of a model takes on the ranks of a run: what `partition_method` 'profile' balances.

Every rank builds one layer after the other on its device, runs it forward and backward a few times on what the layer
before gave, and lets it go. Of each layer the time of the slowest rank counts, so that all ranks cut alike.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor, nn

from mizzen.accelerator import get_accelerator
from mizzen.comm import collectives
from mizzen.config.schema import Config
from mizzen.errors import UsageError
from mizzen.log import log_dist
from mizzen.model.inputs import change_tensors, tensors_in
from mizzen.parallel.pipeline.module import LayeredModule, LayerSpec, TiedLayerSpec
from mizzen.precision.policy import Policy

RUNS: Final = 3
"""How often a layer is timed, after one run that does not count; the shortest time is taken."""


def profile_layers(model: LayeredModule, config: Config) -> None:
    """Measure the layers of a model that is to be cut by that; any other is left alone."""
    layers = model.layer_list
    if layers.partition.lower() != "profile" or config.pipeline_parallel_size == 1:
        return
    if model.options.example_inputs is None:
        raise UsageError(
            "partition_method 'profile' measures layers, which takes something to run them on: give "
            "PipelineModule(example_inputs=...) what the first layer takes, of the size of a micro-batch"
        )
    device, policy = get_accelerator().device(), Policy.of(config)
    dtype: torch.dtype | None = getattr(torch, policy.parameters) if policy.parameters else None
    seconds = torch.tensor(measured(model, device, dtype), dtype=torch.float64, device=device)
    collectives.all_reduce(seconds, op=torch.distributed.ReduceOp.MAX)
    model.layer_list = replace(layers, weights=tuple(seconds.tolist()))
    log_dist(f"measured {len(layers.layers)} layers: {', '.join(f'{1e3 * each:.3g}' for each in seconds.tolist())} ms")


def measured(model: LayeredModule, device: torch.device, dtype: torch.dtype | None) -> list[float]:
    """Seconds of forward and backward of each layer; random numbers go on afterwards as if nothing had run."""
    inputs, found = change_tensors(model.options.example_inputs, partial(_placed, device=device, dtype=dtype)), []
    with torch.random.fork_rng():
        for number in range(len(model.specs)):
            layer = _built(model, number, device, dtype)
            seconds, output = _timed(layer, inputs)
            inputs = change_tensors(output, Tensor.detach)
            found.append(seconds)
    return found


def _built(model: LayeredModule, number: int, device: torch.device, dtype: torch.dtype | None) -> Callable[[Any], Any]:
    spec = model.specs[number]
    if not isinstance(spec, LayerSpec | nn.Module):
        return spec  # type: ignore[no-any-return]
    made = spec.build() if isinstance(spec, LayerSpec) else deepcopy(spec)
    made = made.to(device, dtype).train()
    if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None:
        return partial(spec.forward_fn, made)
    return made


def _timed(layer: Callable[[Any], Any], inputs: Any) -> tuple[float, Any]:
    accelerator, times, output = get_accelerator(), [], None
    for _ in range(1 + RUNS):
        given = change_tensors(inputs, _differentiable)
        accelerator.synchronize()
        start = perf_counter()
        output = layer(given)
        ends = [each for each in tensors_in(output) if each.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(each) for each in ends])
        accelerator.synchronize()
        times.append(perf_counter() - start)
    return min(times[1:]), output


def _placed(tensor: Tensor, *, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)


def _differentiable(tensor: Tensor) -> Tensor:
    """An input as a layer gets it from the one before: it wants a gradient, and may be changed in place."""
    return tensor.detach().requires_grad_().clone() if tensor.is_floating_point() else tensor.clone()
