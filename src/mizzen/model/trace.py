"""Runs a model once without values, to see which layers read what others give.

The forward runs on the meta device, so it costs neither memory nor arithmetic, and every operation is looked at.
"""

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from mizzen.model.flow import Flow, Layer, Way, layer_kind
from mizzen.model.inputs import tensors_in

LENGTHS: Final = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)
"""How long the sequence may be that is run: none of its sizes should be mistaken for a number of features."""
REDUCING: Final = ("mean", "sum", "var", "var_mean", "std", "norm", "amax", "softmax", "linalg_vector_norm", "prod")
DRAWING: Final = ("dropout", "bernoulli", "native_dropout", "rand_like")


def flow_of(model: nn.Module) -> Flow:
    """Run a model once without values. Its mode, its values and its random numbers stay as they are."""
    trouble = ""
    for arguments in _guesses(model):
        try:
            return _run(model, arguments)
        except Exception as error:  # noqa: BLE001  whatever a model does that needs values
            trouble = trouble or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Flow(trouble=trouble or "no input is known that fits its forward")


def _guesses(model: nn.Module) -> Iterator[dict[str, Any] | tuple[Any, ...]]:
    """Arguments that its forward may take: those of transformers by its own description, then one tensor."""
    widths = [size for parameter in model.parameters() for size in parameter.shape]
    length = next((n for n in LENGTHS if all(width % n for width in widths if width > n)), LENGTHS[0])
    tokens = torch.zeros(2, length, dtype=torch.long, device="meta")
    if (config := vars(model).get("config")) is not None:
        said, main = vars(config), str(inspect.getattr_static(model, "main_input_name", "input_ids"))
        quiet = {"use_cache": False} if "use_cache" in said else {}
        if main == "pixel_values":
            side = said.get("image_size", 224)
            sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
            yield {main: torch.zeros(2, said.get("num_channels", 3), *sides, device="meta")}
        if said.get("is_encoder_decoder"):
            yield {main: tokens, "decoder_input_ids": tokens[:, :-1], **quiet}
        yield {main: tokens, **quiet}
    yield (tokens,)
    first = next((module for module in model.modules() if isinstance(module, nn.Linear)), None)
    if first is not None:
        yield (torch.zeros(2, length, first.in_features, device="meta"),)
        yield (torch.zeros(2, first.in_features, device="meta"),)


def _run(model: nn.Module, arguments: dict[str, Any] | tuple[Any, ...]) -> Flow:
    tracer = _Tracer()
    values = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    layers = [(path, kind, module) for path, module in model.named_modules() if (kind := layer_kind(module))]
    owned = {f"{path}.{name}" for path, _, module in layers for name, _ in module.named_parameters(recurse=False)}
    for name, _ in model.named_parameters():
        if name not in owned:
            tracer.remember(values[name], {name: Way()})
    args, kwargs = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    with ExitStack() as stack:
        for path, kind, module in layers:
            tracer.follow(stack, path, kind, module)
        stack.enter_context(torch.random.fork_rng(devices=()))
        stack.enter_context(torch.no_grad())
        stack.enter_context(tracer)
        result = functional_call(model, values, args, kwargs)
    found = [tracer.ways(each) for each in tensors_in(result)]
    return Flow(tuple(tracer.layers.values()), _union(found))


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers of each tensor which layers and parameters it comes from."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers: dict[str, Layer] = {}
        self._ways: dict[int, dict[str, Way]] = {}
        self._outputs: dict[int, str] = {}
        self._kept: list[Tensor] = []  # so that no number is given twice

    def remember(self, tensor: Tensor, ways: dict[str, Way]) -> None:
        self._ways[id(tensor)] = ways
        self._kept.append(tensor)

    def ways(self, tensor: Tensor) -> dict[str, Way]:
        return self._ways.get(id(tensor), {})

    def follow(self, stack: ExitStack, path: str, kind: str, module: nn.Module) -> None:
        """Look at each call of a layer."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = tensors_in((args, kwargs))[0]
            self._kept.append(given)
            known = self.layers.get(path)
            reads = _union([known.reads if known else {}, self.ways(given)])
            rows, columns = dict(module.named_parameters(recurse=False))["weight"].shape
            inputs, outputs = (columns, rows) if kind == "linear" else (rows, columns)
            seen = (known.runs, known.factors) if known else ((), ())
            self.layers[path] = Layer(path, kind, inputs, outputs, reads, *seen)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                self.remember(output, {path: Way()})
                self._outputs[id(output)] = path

        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(after, prepend=True).remove)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":  # a question about values: they are not packed, all are there
            return True if args[0].dtype is torch.bool else 1.0 if args[0].is_floating_point() else 1
        result = func(*args, **(kwargs or {}))
        tensors = tensors_in((args, kwargs or {}))
        ways = [self.ways(each) for each in tensors]
        if any(ways):
            found = self._changed(name, args, kwargs or {}, tensors, ways)
            for each in tensors_in(result):
                self.remember(each, found)
            self._notice_runs(name, args)
            self._notice_factors(name, args, result)
        return result

    def _changed(
        self, name: str, args: Any, kwargs: Any, tensors: list[Tensor], ways: list[dict[str, Way]]
    ) -> dict[str, Way]:
        """What an operation makes of what is known of its arguments."""
        plain = name.strip("_")
        if plain in ("bmm", "matmul", "baddbmm") or "scaled_dot_product" in plain:
            ways = _with_heads(plain, tensors, ways)
        found = _union(ways)
        sizes = _reduced_sizes(plain, args, kwargs)
        is_random = any(word in plain for word in DRAWING) or float(kwargs.get("dropout_p", 0) or 0) > 0
        if not sizes and not is_random:
            return found
        return {
            source: replace(way, reduced=way.reduced | sizes, is_random=way.is_random or is_random)
            for source, way in found.items()
        }

    def _notice_runs(self, name: str, args: Any) -> None:
        """Whether the output of a layer is taken apart along its features."""
        path = self._outputs.get(id(args[0])) if args and isinstance(args[0], Tensor) else None
        if path is None or name not in ("split", "split_with_sizes", "slice", "chunk"):
            return
        tensor = args[0]
        dim = args[1] if name == "slice" and len(args) > 1 else args[2] if len(args) > 2 else 0
        if dim not in (-1, tensor.dim() - 1):
            return
        layer, size = self.layers[path], tensor.shape[-1]
        if name == "slice":
            start, stop = (0 if args[2] is None else args[2]), min(size if args[3] is None else args[3], size)
            known = sorted({0, size, start % (size + 1), stop % (size + 1)} | _edges(layer.runs))
            runs = tuple(b - a for a, b in zip(known, known[1:], strict=False) if b > a)
        elif name == "split":
            runs = tuple(min(args[1], size - at) for at in range(0, size, args[1]))
        else:
            runs = tuple(args[1])
        self.layers[path] = replace(layer, runs=runs if len(runs) > 1 else layer.runs)

    def _notice_factors(self, name: str, args: Any, result: Any) -> None:
        """Whether the features of a layer's output are seen as several dimensions."""
        path = self._outputs.get(id(args[0])) if args and isinstance(args[0], Tensor) else None
        if path is None or name not in ("view", "_unsafe_view", "reshape") or not isinstance(result, Tensor):
            return
        if result.shape[-1] == args[0].shape[-1]:  # the same features, of tokens that are counted otherwise
            self._outputs[id(result)] = path
            return
        factors: list[int] = []
        for size in reversed(result.shape):
            factors.insert(0, size)
            if math.prod(factors) >= args[0].shape[-1]:
                break
        self.layers[path] = replace(self.layers[path], factors=tuple(factors))


def _edges(runs: Iterable[int]) -> set[int]:
    found, at = {0}, 0
    for run in runs:
        at += run
        found.add(at)
    return found


def _with_heads(name: str, tensors: list[Tensor], ways: list[dict[str, Way]]) -> list[dict[str, Way]]:
    """Ways with the sizes of heads, where two activations are multiplied."""
    at = 1 if name == "baddbmm" else 0
    pairs = list(zip(tensors, ways, strict=True))
    if name in ("bmm", "matmul", "baddbmm"):
        (left, to_left), (right, to_right) = pairs[at : at + 2]
        if not to_left or not to_right:
            return ways
        is_second = any(way.head for way in to_left.values())
        sizes = {id(left): left.shape[-1], id(right): right.shape[-1] if is_second else left.shape[-1]}
    else:
        sizes = {id(tensor): tensor.shape[-1] for tensor, _ in pairs[:3]}
    return [
        {source: way if way.head else replace(way, head=sizes.get(id(tensor), 0)) for source, way in to.items()}
        for tensor, to in pairs
    ]


def _reduced_sizes(name: str, args: Any, kwargs: Any) -> frozenset[int]:
    """The sizes of the dimensions that an operation reduces."""
    tensor = args[0] if args and isinstance(args[0], Tensor) else None
    if tensor is None or not tensor.dim():
        return frozenset()
    if name in ("native_layer_norm", "layer_norm", "fused_rms_norm", "rms_norm"):
        return frozenset(args[1])
    if name.removeprefix("log_").removeprefix("safe_") not in REDUCING:
        return frozenset()
    place = 2 if name == "linalg_vector_norm" else 1
    dims = kwargs.get("dim", args[place] if len(args) > place else None)
    if dims is None or isinstance(dims, float):
        return frozenset(tensor.shape)
    chosen = [dims] if isinstance(dims, int) else list(dims)
    return frozenset(tensor.shape[dim] for dim in (chosen or range(tensor.dim())) if isinstance(dim, int))


def _union(ways: Iterable[Mapping[str, Way]]) -> dict[str, Way]:
    found: dict[str, Way] = {}
    for each in ways:
        for source, way in each.items():
            found[source] = found[source] | way if source in found else way
    return found
