"""Runs a model once without values, to see which layers read what others give, or what modules are called with.

The forward runs on the meta device, so it costs neither memory nor arithmetic, and every operation is looked at.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from mizzen.model.flow import Argument, CallPath, Flow, Layer, ModuleCall, TracedOperation, Use, Way, layer_kind
from mizzen.model.inputs import tensors_in

LENGTHS: Final = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)
"""How long the sequence may be that is run: none of its sizes should be mistaken for a number of features."""
REDUCING: Final = ("mean", "sum", "var", "var_mean", "std", "norm", "amax", "softmax", "linalg_vector_norm", "prod")
DRAWING: Final = ("dropout", "bernoulli", "native_dropout", "rand_like")
Arguments = dict[str, Any] | tuple[Any, ...]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""What a module is called with: arguments, and those by name."""
Found = TypeVar("Found")
PRODUCTS: Final = {"mm": 0, "addmm": 1, "bmm": 0, "matmul": 0, "baddbmm": 1, "grouped_mm": 0}
"""Products, and the place of their first factor."""
NORMS: Final = ("native_layer_norm", "layer_norm", "fused_rms_norm", "rms_norm")
TOKENWISE: Final = frozenset(
    {
        *("add", "sub", "rsub", "mul", "div", "pow", "square", "sqrt", "rsqrt", "reciprocal", "neg", "abs", "exp"),
        *("log", "log1p", "expm1", "sin", "cos"),
        *("tanh", "sigmoid", "relu", "gelu", "silu", "elu", "mish", "erf", "softplus", "leaky_relu", "hardtanh"),
        *("clamp", "clamp_min", "clamp_max", "maximum", "minimum", "where", "masked_fill", "addcmul", "isinf", "isnan"),
        *("to_copy", "to", "clone", "copy", "detach", "alias", "lift_fresh", "empty_like", "zeros_like", "ones_like"),
        *("view", "unsafe_view", "reshape", "expand", "contiguous", "type_as", "lt", "le", "gt", "ge", "eq", "ne"),
        *("fill", "zero", *DRAWING, *NORMS, *REDUCING),
    }
)
"""Operations that leave each token to itself, if they keep shapes and sum over features alone."""


def flow_of(model: nn.Module) -> Flow:
    """Run a model once without values. Its mode, its values and its random numbers stay as they are."""
    found = _first_that_runs(model, _guesses(model, 2, _unmistakable(model)), _run)
    return Flow(trouble=found) if isinstance(found, str) else found


def calls_of(model: nn.Module, paths: Iterable[str], samples: int, length: int) -> dict[str, Call] | str:
    """What modules are called with, without values, for so many samples of a length; or why that is not known."""
    wanted = {path: model.get_submodule(path) for path in paths}

    def run(model: nn.Module, arguments: Arguments) -> dict[str, Call]:
        found: dict[str, Call] = {}
        with ExitStack() as stack:
            for path, module in wanted.items():

                def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str = path) -> None:
                    found.setdefault(path, (args, kwargs))

                stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
            _call(model, _values(model), arguments, _Tracer(), stack)
        return found

    return _first_that_runs(model, _guesses(model, samples, length), run)


def _first_that_runs(
    model: nn.Module, guesses: Iterable[Arguments], run: Callable[[nn.Module, Arguments], Found]
) -> Found | str:
    """What a run with the first arguments gives that a model takes, or what is wrong with the first of all."""
    trouble = ""
    for arguments in guesses:
        try:
            return run(model, arguments)
        except Exception as error:  # noqa: BLE001  whatever a model does that needs values
            trouble = trouble or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return trouble or "no input is known that fits its forward"


def _unmistakable(model: nn.Module) -> int:
    """A length of sequences that is no number of features, nor divides one."""
    widths = [size for parameter in model.parameters() for size in parameter.shape]
    return next((n for n in LENGTHS if all(width % n for width in widths if width >= n)), LENGTHS[0])


def _guesses(model: nn.Module, samples: int, length: int) -> Iterator[Arguments]:
    """Arguments that its forward may take: those of transformers by its own description, then one tensor."""
    tokens = torch.zeros(samples, length, dtype=torch.long, device="meta")
    if (config := vars(model).get("config")) is not None:
        said, main = vars(config), str(inspect.getattr_static(model, "main_input_name", "input_ids"))
        quiet = {"use_cache": False} if "use_cache" in said else {}
        if main == "pixel_values":
            side = said.get("image_size", 224)
            sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
            yield {main: torch.zeros(samples, said.get("num_channels", 3), *sides, device="meta")}
        if said.get("is_encoder_decoder"):
            yield {main: tokens, "decoder_input_ids": tokens[:, :-1], **quiet}
        yield {main: tokens, **quiet}
    yield (tokens,)
    first = next((module for module in model.modules() if isinstance(module, nn.Linear)), None)
    if first is not None:
        yield (torch.zeros(samples, length, first.in_features, device="meta"),)
        yield (torch.zeros(samples, first.in_features, device="meta"),)


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def _call(
    model: nn.Module, values: dict[str, Tensor], arguments: Arguments, tracer: "_Tracer", stack: ExitStack
) -> Any:
    args, kwargs = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    stack.enter_context(torch.random.fork_rng(devices=()))
    stack.enter_context(torch.no_grad())
    stack.enter_context(tracer)
    return functional_call(model, values, args, kwargs)


def _run(model: nn.Module, arguments: Arguments) -> Flow:
    tracer, values = _Tracer(), _values(model)
    layers = [(path, kind, module) for path, module in model.named_modules() if (kind := layer_kind(module))]
    owned = {f"{path}.{name}" for path, _, module in layers for name, _ in module.named_parameters(recurse=False)}
    for name, _ in model.named_parameters():
        tracer.follow_parameter(name, values[name])
        if name not in owned:
            tracer.remember(values[name], {name: Way()})
    with ExitStack() as stack:
        _train(model, stack)
        for path, kind, module in layers:
            tracer.follow(stack, path, kind, module)
        known = {path for path, _, _ in layers}
        for path, module in model.named_modules():
            if path not in known:
                tracer.watch(stack, path, module)
        result = _call(model, values, arguments, tracer, stack)
    found = [tracer.ways(each) for each in tensors_in(result)]
    return Flow(
        tuple(tracer.layers.values()),
        _union(found),
        calls=tracer.calls,
        uses=tuple(tracer.uses),
        operations=tuple(tracer.operations),
    )


def _train(model: nn.Module, stack: ExitStack) -> None:
    """Let a model that is read from files, and comes in evaluation mode, show its dropout. Their modes come back.

    One that leaves out layers at random in training stays as it is: all of them are to be seen.
    """
    if any(vars(module).get("layerdrop") for module in model.modules()):
        return
    for module in model.modules():
        stack.callback(setattr, module, "training", module.training)
        module.training = True


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers of each tensor which layers and parameters it comes from."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers: dict[str, Layer] = {}
        self.calls: dict[str, ModuleCall] = {}
        self.uses: dict[Use, None] = {}
        self.operations: dict[TracedOperation, None] = {}
        self._place: CallPath = ()
        self._last = ""
        self._ways: dict[int, dict[str, Way]] = {}
        self._parameter_names: dict[int, str] = {}
        self._learned: set[int] = set()
        self._made: dict[int, CallPath] = {}
        self._passed: dict[int, frozenset[str]] = {}
        self._outputs: dict[int, tuple[str, ...]] = {}
        self._kept: list[Tensor] = []  # so that no number is given twice

    def remember(self, tensor: Tensor, ways: dict[str, Way]) -> None:
        self._ways[id(tensor)] = ways
        self._made[id(tensor)] = self._place
        self._passed.pop(id(tensor), None)
        self._kept.append(tensor)

    def ways(self, tensor: Tensor) -> dict[str, Way]:
        return self._ways.get(id(tensor), {})

    def follow_parameter(self, name: str, value: Tensor) -> None:
        """Look at where a parameter is used, and what it is in."""
        self._parameter_names[id(value)] = name
        self._learned.add(id(value))

    def follow(self, stack: ExitStack, path: str, kind: str, module: nn.Module) -> None:
        """Look at each call of a layer."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._place, self._last = (*self._place, path), path
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
                self.remember(output, {path: Way(features=frozenset({(0, output.shape[-1])}))})
                self._outputs[id(output)] = (path,)
            self._place = self._place[:-1]

        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(after, prepend=True).remove)

    def watch(self, stack: ExitStack, path: str, module: nn.Module) -> None:
        """Look at what another module is given, and at what it returns."""
        names = tuple(inspect.signature(module.forward).parameters)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._place = (*self._place, path)
            self._pass(path, tensors_in((args, kwargs)))
            known = self.calls.get(path, ModuleCall(path))
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            takes = tuple(
                Argument(names.index(name) if name in names else len(names), name)
                if isinstance(value, Tensor)
                else None
                for name, value in given.items()
                if any(map(self._is_activation, tensors_in(value)))
            )
            self.calls[path] = replace(known, takes=takes, times=known.times + 1)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._place = self._place[:-1]
            found = tensors_in(output)
            self._pass(path, found)
            count = sum(map(self._is_activation, found))
            sources = _union(map(self.ways, found))
            gives = count if found and self._is_activation(found[0]) else -1
            self.calls[path] = replace(self.calls[path], gives=gives, sources=sources)

        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(after).remove)

    def _pass(self, path: str, tensors: Iterable[Tensor]) -> None:
        """Note that a module was given activations, or returns them."""
        for each in filter(self._is_activation, tensors):
            self._passed[id(each)] = self._passed.get(id(each), frozenset()) | {path}

    def _is_activation(self, tensor: Tensor) -> bool:
        return tensor.dim() == 3 and tensor.is_floating_point() and bool(self.ways(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":  # a question about values: they are not packed, all are there
            return True if args[0].dtype is torch.bool else 1.0 if args[0].is_floating_point() else 1
        result = _product_of_groups(*args[:2]) if name == "_grouped_mm" else func(*args, **(kwargs or {}))
        tensors, results = tensors_in((args, kwargs or {})), tensors_in(result)
        ways = [self.ways(each) for each in tensors]
        plain = name.strip("_")
        draws = any(word in plain for word in DRAWING) or float((kwargs or {}).get("dropout_p", 0) or 0) > 0
        self._notice_uses(tensors)
        self._notice_operation(name, args, kwargs or {}, list(zip(tensors, ways, strict=True)), results, draws=draws)
        if any(ways):
            found = self._changed(plain, args, kwargs or {}, tensors, ways, draws=draws)
            for each in results:
                self.remember(each, found)
            if name.endswith("_"):
                self._notice_write(result, found)
            self._notice_runs(name, args, results)
            self._notice_factors(name, args, result)
            self._notice_sum(plain, tensors, results)
        return result

    def _notice_uses(self, tensors: list[Tensor]) -> None:
        """Where parameters are worked on, and activations elsewhere than where they were made."""
        for each in tensors:
            made = self._made.get(id(each), self._place)
            if name := self._parameter_names.get(id(each)):
                self.uses[Use(name, (), self._place)] = None
            elif made != self._place and self.ways(each):
                self.uses[Use("", made, self._place, self._passed.get(id(each), frozenset()))] = None

    def _notice_operation(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        given: list[tuple[Tensor, dict[str, Way]]],
        results: list[Tensor],
        *,
        draws: bool,
    ) -> None:
        """Whether random numbers are drawn for something that parameters are in, or tokens of activations meet."""
        if not any(id(tensor) in self._learned for tensor, _ in given):
            return
        self._learned.update(map(id, results))
        self._kept.extend(results)
        if self._place[-1] in self.layers:
            return
        mixes = any(_is_of_layers(ways) for _, ways in given) and _mixes(name.strip("_"), args, kwargs, given, results)
        if draws or mixes:
            reads = frozenset(source for _, ways in given for source in ways)
            self.operations[TracedOperation(name, self._place, reads, self._last, draws, mixes)] = None

    def _changed(
        self, plain: str, args: Any, kwargs: Any, tensors: list[Tensor], ways: list[dict[str, Way]], *, draws: bool
    ) -> dict[str, Way]:
        """What an operation makes of what is known of its arguments."""
        if _is_attention(plain, ways):
            ways = _with_heads(plain, tensors, ways)
        found = _union(ways)
        sizes = _reduced_sizes(plain, args, kwargs)
        if plain in PRODUCTS and not all(map(_is_of_layers, _factors(plain, ways))):
            sizes |= {_factors(plain, tensors)[0].shape[-1]}
        if not sizes and not draws:
            return found
        return {
            source: replace(way, reduced=way.reduced | sizes, is_random=way.is_random or draws)
            for source, way in found.items()
        }

    def _notice_write(self, written: Any, found: dict[str, Way]) -> None:
        """What is written into a part of a tensor is in the tensor, too."""
        whole = written._base if isinstance(written, Tensor) else None
        if whole is not None:
            self.remember(whole, _union([self.ways(whole), found]))

    def _notice_runs(self, name: str, args: Any, results: list[Tensor]) -> None:
        """Whether the output of layers is taken apart along its features, and which of these each part has."""
        paths = self._outputs.get(id(args[0]), ()) if args and isinstance(args[0], Tensor) else ()
        if not paths or name not in ("split", "split_with_sizes", "slice", "chunk"):
            return
        tensor = args[0]
        dim = args[1] if name == "slice" and len(args) > 1 else args[2] if len(args) > 2 else 0
        if dim not in (-1, tensor.dim() - 1):
            return
        known, size = self.layers[paths[0]].runs, tensor.shape[-1]
        if name == "slice":
            start, stop, _ = slice(*(*args[2:5], None, None, None)[:3]).indices(size)
            ranges = [(start, stop)]
            edges = sorted({0, size, start, stop} | _edges(known))
            runs = tuple(b - a for a, b in zip(edges, edges[1:], strict=False) if b > a)
        else:
            runs = tuple(each.shape[-1] for each in results)
            ranges = list(itertools.pairwise(itertools.accumulate(runs, initial=0)))
        for path in paths:
            self.layers[path] = replace(self.layers[path], runs=runs if len(runs) > 1 else known)
        for each, where in zip(results, ranges, strict=True):
            part = {path: replace(self.ways(each)[path], features=frozenset({where})) for path in paths}
            self.remember(each, {**self.ways(each), **part})

    def _notice_factors(self, name: str, args: Any, result: Any) -> None:
        """Whether the features of the output of layers are seen as several dimensions."""
        paths = self._outputs.get(id(args[0]), ()) if args and isinstance(args[0], Tensor) else ()
        if not paths or name not in ("view", "_unsafe_view", "reshape") or not isinstance(result, Tensor):
            return
        if result.shape[-1] == args[0].shape[-1]:  # the same features, of tokens that are counted otherwise
            self._outputs[id(result)] = paths
            return
        factors: list[int] = []
        for size in reversed(result.shape):
            factors.insert(0, size)
            if math.prod(factors) >= args[0].shape[-1]:
                break
        for path in paths:
            self.layers[path] = replace(self.layers[path], factors=tuple(factors))

    def _notice_sum(self, plain: str, tensors: list[Tensor], results: list[Tensor]) -> None:
        """Whether outputs of layers are added up, as those of a layer and of its adapter are, or one is scaled."""
        terms = [each for each in tensors if each.dim()]
        if plain != "add" and (plain not in ("mul", "to_copy") or len(terms) != 1):
            return
        added = [self._outputs.get(id(each), ()) for each in terms]
        paths = tuple(dict.fromkeys(path for outputs in added for path in outputs))
        is_alike = {each.shape for each in terms} == {results[0].shape}
        if is_alike and all(added) and all(self.layers[path].kind != "embedding" for path in paths):
            self._outputs[id(results[0])] = paths


def _product_of_groups(rows: Tensor, matrices: Tensor) -> Tensor:
    """What experts compute, each with its rows: without values torch knows it in bfloat16 and for some sizes alone."""
    return rows.new_empty(*rows.shape[:-1], matrices.shape[-1])


def _edges(runs: Iterable[int]) -> set[int]:
    found, at = {0}, 0
    for run in runs:
        at += run
        found.add(at)
    return found


def _factors(name: str, of: Sequence[Found]) -> Sequence[Found]:
    """Both of a product."""
    return of[PRODUCTS[name] : PRODUCTS[name] + 2]


def _is_of_layers(ways: Mapping[str, Way]) -> bool:
    """Whether a tensor has what layers give, and not parameters or numbers alone."""
    return any(way.features for way in ways.values())


def _is_attention(name: str, ways: Sequence[Mapping[str, Way]]) -> bool:
    """Whether two activations are multiplied with each other."""
    if name in ("bmm", "matmul", "baddbmm"):
        return all(map(_is_of_layers, _factors(name, ways)))
    return "scaled_dot_product" in name


def _with_heads(name: str, tensors: list[Tensor], ways: list[dict[str, Way]]) -> list[dict[str, Way]]:
    """Ways with the sizes of heads, where two activations are multiplied."""
    at = 1 if name == "baddbmm" else 0
    pairs = list(zip(tensors, ways, strict=True))
    if name in ("bmm", "matmul", "baddbmm"):
        (left, to_left), (right, _) = pairs[at : at + 2]
        is_second = any(way.head for way in to_left.values())
        sizes = {id(left): left.shape[-1], id(right): right.shape[-1] if is_second else left.shape[-1]}
        values = right if is_second else None
    else:
        sizes = {id(tensor): tensor.shape[-1] for tensor, _ in pairs[:3]}
        values = pairs[2][0]
    return [
        {source: _with_head(way, sizes.get(id(tensor), 0), is_value=tensor is values) for source, way in to.items()}
        for tensor, to in pairs
    ]


def _with_head(way: Way, size: int, *, is_value: bool) -> Way:
    return replace(way, head=way.head or size, value=way.value or (size if is_value else 0))


def _mixes(
    name: str, args: Any, kwargs: Any, given: list[tuple[Tensor, dict[str, Way]]], results: list[Tensor]
) -> bool:
    """Whether tokens of activations, (samples, tokens, features), meet in an operation, or something of all tokens."""
    tokens = {tensor.shape[:2] for tensor, ways in given if ways and tensor.dim() > 2}
    if not tokens:
        return False
    is_kept = all(each.dim() > 2 and each.shape[:2] in tokens for each in results)
    beside = (tensor for tensor, ways in given if not ways or tensor.dim() < 3)
    if name not in TOKENWISE or len(tokens) > 1 or not is_kept:
        return True
    if any(each.dim() > 1 and each.shape[-2] != 1 for each in beside):
        return True
    first = args[0]
    if name in ("view", "unsafe_view", "reshape", "expand"):
        return bool(results[0].shape != first.shape)
    if name in NORMS:
        return len(args[1]) > 1
    return name in REDUCING and _reduced_dims(name, args, kwargs) != {first.dim() - 1}


def _reduced_dims(name: str, args: Any, kwargs: Any) -> set[int]:
    """The dimensions that an operation reduces."""
    place = 2 if name == "linalg_vector_norm" else 1
    dims = kwargs.get("dim", args[place] if len(args) > place else None)
    every = args[0].dim()
    if dims is None or isinstance(dims, float):
        return set(range(every))
    chosen = [dims] if isinstance(dims, int) else list(dims)
    return {dim % every for dim in (chosen or range(every)) if isinstance(dim, int)}


def _reduced_sizes(name: str, args: Any, kwargs: Any) -> frozenset[int]:
    """The sizes of the dimensions that an operation reduces."""
    tensor = args[0] if args and isinstance(args[0], Tensor) else None
    if tensor is None or not tensor.dim():
        return frozenset()
    if name in NORMS:
        return frozenset(args[1])
    if name.removeprefix("log_").removeprefix("safe_") not in REDUCING:
        return frozenset()
    return frozenset(tensor.shape[dim] for dim in _reduced_dims(name, args, kwargs))


def _union(ways: Iterable[Mapping[str, Way]]) -> dict[str, Way]:
    found: dict[str, Way] = {}
    for each in ways:
        for source, way in each.items():
            found[source] = found[source] | way if source in found else way
    return found
