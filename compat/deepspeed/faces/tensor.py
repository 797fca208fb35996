"""`deepspeed.module_inject.layers`: linear layers made from whole ones, of which each rank of a group keeps a part.

The parameters stay the objects that they are, and say what they are a part of: an engine leaves them as they are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.faces import shard_sizes
from mizzen.errors import NotBuilt, UsageError
from mizzen.parallel.tensor.cuts import runs_in
from mizzen.parallel.tensor.exchange import copy_in, gather_along, split_along, sum_out
from mizzen.parallel.tensor.layers import LayerOptions


class AUTOTP_MODE(Enum):  # noqa: N801  the name is theirs
    """What layers that are cut are for. Ours do both at any time."""

    TRAINING = "TRAINING"
    INFERENCE = "INFERENCE"


def set_autotp_mode(training: bool = False) -> None:
    """Nothing: a layer that is cut can be trained whenever its gradients are asked for."""


def get_auto_tp_mode() -> AUTOTP_MODE:
    """What layers that are cut can do: be trained."""
    return AUTOTP_MODE.TRAINING


def is_autotp_training_mode() -> bool:
    """Whether layers that are cut can be trained."""
    return True


class TensorParallel_Layer(nn.Module):  # noqa: N801  the name is theirs
    """A linear layer of which each rank of a group has a part."""

    dim = 0
    """Of the weight, along which it is cut."""
    stride = 1

    def __init__(
        self,
        module: Any,
        mp_group: Any = None,
        skip_partition: bool = False,
        *,
        runs: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._runs = runs
        self.mp_group, self.name = mp_group, kwargs.get("name")
        self._options = LayerOptions(mp_group, stride=self.stride)
        self.tp_world_size, self.tp_index = self._options.ranks, self._options.rank
        self.weight: nn.Parameter = module.weight
        self.bias: nn.Parameter | None = module.bias
        self._size = self.weight.shape[self.dim]
        if not skip_partition:
            self._tp_partition([self.weight, self.bias])

    def _tp_partition(self, params_list: list[nn.Parameter | None]) -> None:
        """Keep this rank's parts of a whole weight and bias."""
        weight, bias = params_list
        if weight is not None:
            self._options.keep_part(weight, self.dim, "weight", self._runs)
        if bias is not None and self.dim == 0:
            self._options.keep_part(bias, 0, "bias", self._runs)

    @torch.no_grad()
    def gather_params(self, params_list: list[nn.Parameter | None]) -> None:
        """Let a weight and a bias be whole again on every rank."""
        every = self._options.parts_of_runs(self._size, "weight", self._runs)
        for parameter, is_cut in zip(params_list, (True, self.dim == 0), strict=True):
            if parameter is not None and is_cut:
                dim = self.dim if parameter.dim() > 1 else 0
                own = torch.split(parameter.data, [sizes[self.tp_index] for sizes in every], dim)
                whole = [gather_along(run, dim, self.mp_group, sizes) for run, sizes in zip(own, every, strict=True)]
                parameter.data = torch.cat(whole, dim)

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"weight {list(self.weight.shape)}, tp={self.tp_world_size}, bias={self.bias is not None}"


class LinearLayer(TensorParallel_Layer):
    """Each rank has some output features; its output is that part of them."""

    def forward(self, input: Tensor) -> Tensor:
        """This rank's features."""
        return functional.linear(copy_in(input, self.mp_group), self.weight, self.bias)

    @classmethod
    def from_weights(
        cls,
        weight_shape: Any = None,
        dtype: torch.dtype = torch.half,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> "LinearLayer":
        """A layer of these weights, which are a rank's part already."""
        given = torch.empty(*weight_shape, dtype=dtype) if weight is None else weight
        module = nn.Linear(given.shape[1], given.shape[0], bias=bias is not None, dtype=given.dtype, device="meta")
        module.weight = nn.Parameter(given)
        if bias is not None:
            module.bias = nn.Parameter(bias)
        return cls(module, skip_partition=True)


class GateUpPack_LinearLayer(LinearLayer):  # noqa: N801  the name is theirs
    """Two matrices in one, gate and up: each rank has some features of both."""

    stride = 2


class LinearAllreduce(TensorParallel_Layer):
    """Each rank has the weights of some input features, and takes that part of them; outputs are summed."""

    dim = 1

    def forward(self, input: Tensor) -> Tensor:
        """All features, on every rank."""
        output = sum_out(functional.linear(input, self.weight), self.mp_group)
        return output if self.bias is None else output + self.bias


class SubParamLinearLayer(LinearLayer):
    """Several matrices in one, such as Q, K and V: each rank has some output features of each."""

    def __init__(self, module: Any, mp_group: Any, shape: Any, partition_dim: int = 0, **kwargs: Any) -> None:
        outputs, inputs = module.weight.shape
        super().__init__(module, mp_group, runs=_runs(shape, outputs, inputs, partition_dim, self.dim), **kwargs)
        self.shape, self.partition_dim = shape, partition_dim


class SubParamLinearAllreduce(LinearAllreduce):
    """Several matrices in one, side by side: each rank has the weights of some input features of each."""

    def __init__(self, module: Any, mp_group: Any, shape: Any, partition_dim: int = 1, **kwargs: Any) -> None:
        outputs, inputs = module.weight.shape
        super().__init__(module, mp_group, runs=_runs(shape, inputs, outputs, partition_dim, self.dim), **kwargs)
        self.shape, self.partition_dim = shape, partition_dim


def _runs(shape: Any, size: int, others: int, place: int, dim: int) -> tuple[int, ...]:
    try:
        return runs_in(shape, size, others, place, by_inputs=dim == 1)
    except ValueError as error:
        raise UsageError(f"shape={shape!r} does not fit a layer of {size} and {others} features: {error}") from None


class LmHeadLinearAllreduce(LinearAllreduce):
    """A head whose input every rank has whole: it takes its part of the features, and the logits are summed."""

    def forward(self, input: Tensor) -> Tensor:
        """The logits of all tokens, on every rank."""
        return super().forward(split_along(input, -1, self.mp_group, self._options.parts(self._size, "weight")))


class RowParallel:
    """The sum over ranks, whose gradient goes to each of them, called as an autograd function is."""

    @staticmethod
    def apply(group: Any, input: Tensor, is_inference_mode: bool = False) -> Tensor:
        """Sum."""
        return sum_out(input, group)


class ColumnParallel:
    """The way into layers that are cut, where gradients are summed, called as an autograd function is."""

    @staticmethod
    def apply(group: Any, input: Tensor) -> Tensor:
        """As it is."""
        return copy_in(input, group)


class AsyncColumnParallel:
    """A linear layer that is cut by its outputs, as one call."""

    @staticmethod
    def apply(group: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's features."""
        return functional.linear(copy_in(input, group), weight, bias)


class GatherFromTensorParallelRegion:
    """The parts of all ranks end to end along the features, called as an autograd function is."""

    @staticmethod
    def apply(group: Any, input: Tensor) -> Tensor:
        """All features."""
        return gather_along(input, -1, group)


def add_bias(input: Tensor, bias: Tensor | None) -> Tensor:
    """The sum, or the input where there is no bias."""
    return input if bias is None else input + bias


def configure_tensor_parallel_runtime(config: Any) -> None:
    """Nothing: a layer has all that it needs from its group, and an engine from its configuration."""


@contextmanager
def GatherReplacedLayerParams(  # noqa: N802  the name is theirs
    params: Iterable[nn.Parameter] | nn.Parameter, module: nn.Module, enabled: bool = True
) -> Iterator[None]:
    """Inside, parameters of layers that are cut are whole on every rank; what is written to them there stays."""
    wanted = {id(each) for each in ([params] if isinstance(params, nn.Parameter) else params)}
    layers = [
        layer
        for layer in module.modules()
        if isinstance(layer, TensorParallel_Layer) and {id(layer.weight), id(layer.bias)} & wanted
    ]
    for layer in layers if enabled else ():
        layer.gather_params([layer.weight, layer.bias])
    try:
        yield
    finally:
        for layer in layers if enabled else ():
            layer._tp_partition([layer.weight, layer.bias])


class FusedModuleWrapper:
    """Keeps a module beside a layer of it without making it the layer's child."""

    def __init__(self, fused_module: nn.Module) -> None:
        self.fused_module = fused_module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fused_module, name)


RUNS_OF_KINDS: Final = {"glmtype": 3, "qwentype": 3, "bloomtype": 1}
"""How Q, K and V lie in one matrix, by the words for it: three matrices, or three rows for each head."""
QUERY_HEADS: Final = ("num_attention_heads", "num_attention_heads_per_partition", "num_heads", "n_heads", "n_head")
KEY_HEADS: Final = (
    *("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_n_heads", "n_head_kv"),
    *("multi_query_group_num", "num_multi_query_groups_per_partition"),
)
"""Under these names a module or its configuration says how many heads of keys there are, as many as of values."""


class fused_LinearLayer(LinearLayer):  # noqa: N801  the name is theirs
    """Q, K and V in one matrix, as the class of the block around it has them: each rank has some heads of each."""

    def __init__(self, module: Any, mp_group: Any, skip_partition: bool = False, **kwargs: Any) -> None:
        block = kwargs.pop("fused_module", None)
        kind = "glmtype" if block is None else get_fused_qkv_type(block)
        if kind not in RUNS_OF_KINDS:
            raise NotBuilt(
                f"fused_LinearLayer of {type(block).__name__}, whose Q, K and V lie as {kind} has them: use "
                "SubParamLinearLayer(shape=((q, k, v), -1)), or let tensor_parallel.autotp_size find it"
            )
        count, size = RUNS_OF_KINDS[kind], module.weight.shape[0]
        if count > 1 and not skip_partition:
            _refuse_unequal(block, module.weight.shape, count)
        runs = (size // count,) * count if count > 1 else ()
        super().__init__(module, mp_group, skip_partition, runs=runs, **kwargs)


def _refuse_unequal(block: Any, shape: Sequence[int], count: int) -> None:
    """Refuse a matrix of Q, K and V that are not of one size: its rows, the block or the process says so."""
    size, inputs = shape
    known = list(_head_counts(block))
    fewer = next(((queries, keys) for queries, keys in known if keys < queries), None)
    if size % count:
        reason = f"{size} rows are not {count} equal runs"
    elif fewer is not None:
        reason = f"there are {fewer[0]} heads of queries and {fewer[1]} of keys"
    elif not known and size < count * inputs:
        reason = f"{size} rows are fewer than {count} * {inputs}, as with fewer heads of keys than of queries"
    else:
        return
    raise NotBuilt(
        f"fused_LinearLayer of {size} output and {inputs} input features, whose Q, K and V differ in size: {reason}. "
        "Use SubParamLinearLayer(shape=((q, k, v), -1)), or let tensor_parallel.autotp_size find it"
    )


def _head_counts(block: Any) -> Iterator[tuple[int, int]]:
    """(heads of queries, heads of keys), wherever both are said: in the process, in a block or in its configuration."""
    set_ones = shard_sizes.get_num_attention_heads(), shard_sizes.get_num_kv_heads()
    found: list[tuple[Any, Any]] = [set_ones]
    for facts in _facts_of(_unwrapped(block)):
        if facts.get("multi_query_attention", True):  # without it a configuration of ChatGLM2 has a number nobody reads
            queries, keys = (
                next((facts[name] for name in names if name in facts), None) for names in (QUERY_HEADS, KEY_HEADS)
            )
            found.append((queries, keys))
    yield from ((queries, keys) for queries, keys in found if isinstance(queries, int) and isinstance(keys, int))


def _facts_of(block: Any) -> Iterator[Mapping[str, Any]]:
    """The attributes of the modules of a block, and those of their configurations."""
    for module in block.modules() if isinstance(block, nn.Module) else ():
        yield vars(module)
        config = vars(module).get("config")
        with suppress(TypeError):  # it may be an object without attributes
            yield config if isinstance(config, Mapping) else vars(config)


def _unwrapped(module: Any) -> Any:
    return module.fused_module if isinstance(module, FusedModuleWrapper) else module


def get_fused_qkv_type(module: Any) -> str | None:
    """How Q, K and V lie in one matrix of a block, by the name of its class; None where that is not known."""
    kinds = import_module("deepspeed.module_inject.fusedqkv_utils").FUSED_QKV_TYPE_DICT
    block = _unwrapped(module)
    return next((kind for name, kind in kinds.items() if name in str(type(block))), None)


def require_tp_fused_qkvw(name: str, mp_size: int) -> bool:
    """Whether a layer of this name is taken to have Q, K and V in one matrix."""
    words = ("qkv_proj", "query_key_value", "attn.Wqkv", "self_attn.W_pack", "c_attn")
    return mp_size > 1 and any(word in name for word in words)


def split_by_qkvlist_and_refuse(
    qkv_list: Iterable[Tensor], split_size: int, split_dim: int = 0, cat_dim: int = 0
) -> list[Tensor]:
    """Matrices that are cut each, put together again rank by rank."""
    every = [torch.split(matrix, split_size, dim=split_dim) for matrix in qkv_list]
    return [torch.cat(parts, dim=cat_dim) for parts in zip(*every, strict=True)]


class EmbeddingLayer(nn.Module):
    """A table of this weight, or of this shape."""

    def __init__(
        self, weight_shape: Any = None, dtype: torch.dtype = torch.half, weight: Any = None, bias: Any = None
    ) -> None:
        super().__init__()
        self.weight = weight if weight is not None else nn.Parameter(torch.empty(*weight_shape, dtype=dtype))

    def forward(self, input: Tensor, **kwargs: Any) -> Tensor:
        """The rows."""
        return functional.embedding(input, self.weight)


class Normalize(nn.Module):
    """A layer norm of this weight and bias, or of this size."""

    def __init__(
        self, dim: Any = None, dtype: torch.dtype = torch.float, eps: float = 1e-5, weight: Any = None, bias: Any = None
    ) -> None:
        super().__init__()
        self.weight = weight if weight is not None else nn.Parameter(torch.ones(dim, dtype=dtype))
        self.bias = bias if bias is not None else nn.Parameter(torch.zeros_like(self.weight))
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        """In the dtype of the input."""
        found = functional.layer_norm(input.to(self.weight.dtype), self.weight.shape, self.weight, self.bias, self.eps)
        return found.to(input.dtype)


class RMSNormalize(nn.Module):
    """weight * x / rms(x)."""

    def __init__(
        self, dim: Any = None, dtype: torch.dtype = torch.float, eps: float = 1e-5, weight: Any = None
    ) -> None:
        super().__init__()
        self.weight = weight if weight is not None else nn.Parameter(torch.ones(dim, dtype=dtype))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """In the dtype of the input."""
        found = functional.rms_norm(hidden_states.float(), hidden_states.shape[-1:], None, self.eps)
        return found.to(hidden_states.dtype) * self.weight
