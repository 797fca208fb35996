"""How long each layer of a model takes on the ranks of a run: what the method 'profile' of a partition balances.

Every rank builds one layer after the other on its device, runs it forward and backward a few times, and lets it go. Of
each layer the time of the slowest rank counts, so that all ranks cut alike. The layers of a list run on what the one
before gave; the blocks of any other model on made values of the shapes that a run without values shows.
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
from mizzen.config.resolve import resolve
from mizzen.config.schema import Config
from mizzen.errors import UsageError
from mizzen.log import log_dist
from mizzen.model.inputs import change_tensors, tensors_in
from mizzen.model.sketch import Sketch
from mizzen.model.trace import Call, calls_of
from mizzen.parallel.pipeline.blocks import PROFILE, BlockList
from mizzen.parallel.pipeline.module import LayeredModule, LayerSpec, TiedLayerSpec, is_on_meta
from mizzen.precision.policy import Policy

RUNS: Final = 3
"""How often a layer is timed, after one run that does not count; the shortest time is taken."""


def profile_layers(model: LayeredModule, config: Config) -> None:
    """Measure the layers of a model that is to be cut by that; any other is left alone."""
    layers = model.layer_list
    if layers.partition.lower() != PROFILE or config.pipeline_parallel_size == 1:
        return
    if model.options.example_inputs is None:
        raise UsageError(
            "partition_method 'profile' measures layers, which takes something to run them on: give "
            "PipelineModule(example_inputs=...) what the first layer takes, of the size of a micro-batch"
        )
    device, dtype = _place(config)
    seconds = _of_slowest(measured(model, device, dtype), device)
    model.layer_list = replace(layers, weights=tuple(seconds))
    log_dist(f"measured {len(layers.layers)} layers: {', '.join(f'{1e3 * each:.3g}' for each in seconds)} ms")


def profile_blocks(sketch: Sketch, model: nn.Module, config: Config, world: int) -> Sketch:
    """A sketch with what blocks take, and what is beside them, where they are to be dealt out by that."""
    pipeline = config.pipeline
    if pipeline.partition.lower() != PROFILE or config.pipeline_parallel_size == 1 or sketch.layer_list is not None:
        return sketch
    blocks, (device, dtype) = BlockList.find(sketch), _place(config)
    samples = resolve(config, world).batch.micro
    most = getattr(vars(model).get("config"), "max_position_embeddings", None)
    length = min(pipeline.profile_length, most) if isinstance(most, int) else pipeline.profile_length
    paths = (*blocks.before, *blocks.paths, *blocks.after)
    calls = calls_of(model, paths, samples, length)
    if isinstance(calls, str):
        raise UsageError(
            f"pipeline.partition 'profile' measures blocks on what they are called with, and {type(model).__name__} "
            f"does not run on made tokens ({calls}): leave the key out, or write the model as a "
            "mizzen.pipe.PipelineModule with example_inputs"
        )
    found = []
    with torch.random.fork_rng():
        for path in paths:
            if path in calls:
                layer = _copied(model.get_submodule(path), device, dtype)
                inputs = change_tensors(calls[path], partial(_made, device=device, dtype=dtype))
                found.append(_timed(partial(_called, layer), inputs)[0])
            else:
                found.append(0.0)
    seconds = _of_slowest(found, device)
    log_dist(f"measured {len(blocks.paths)} blocks, {samples} samples of {length} tokens: {1e3 * sum(seconds):.3g} ms")
    return replace(sketch, seconds=tuple(zip(paths, seconds, strict=True)))


def _place(config: Config) -> tuple[torch.device, torch.dtype | None]:
    policy = Policy.of(config)
    return get_accelerator().device(), getattr(torch, policy.parameters) if policy.parameters else None


def _of_slowest(seconds: list[float], device: torch.device) -> list[float]:
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    collectives.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return found.tolist()


def _copied(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """A module to run apart from its model, with values of its own where it has none."""
    made = deepcopy(module)
    if is_on_meta(made):
        made = made.to_empty(device=device)
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.is_floating_point():
                nn.init.normal_(tensor, std=0.02)
            else:
                tensor.zero_()
    return made.to(device, dtype).train()


def _called(module: nn.Module, call: Call) -> Any:
    args, kwargs = call
    return module(*args, **kwargs)


def _made(tensor: Tensor, *, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """A tensor of the shape of one without values."""
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, dtype=dtype or tensor.dtype, device=device)
    return (
        torch.ones_like(tensor, device=device)
        if tensor.dtype is torch.bool
        else torch.zeros_like(tensor, device=device)
    )


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
