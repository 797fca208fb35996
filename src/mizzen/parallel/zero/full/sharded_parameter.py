"""A parameter of which this rank holds a shard: one class, which the parameter's own object wears while it is sharded.

How a parameter is cut into shards, one for each rank, and put together again, is below it.

[Note: one object for life]
A parameter is the same object before `initialize`, in training and afterwards, so that references to it, its hooks, and
what others hang on it stay good. While its unit runs it has all its memory and is a plain parameter. In between it has
its shape, its dtype and no memory, and its class is `ShardedParameter`: facts are answered, a use inside a forward pass
gathers it, and everything else is refused by its name: computing with a tensor without memory would end the process.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mizzen.comm import collectives, groups
from mizzen.comm.backend import Tag
from mizzen.errors import UsageError, expect
from mizzen.model.inputs import change_tensors, tensors_in
from mizzen.offload.away import check_here

WAYS: Final = (
    "use it inside the model's forward, or in a method that is called on the engine; gather it with "
    "mizzen.zero.GatheredParameters; or read and write it with mizzen.zero.safe_get_full_fp32_param and "
    "safe_set_full_fp32_param"
)
MULTIPLE: Final = 32
"""Elements; what the optimizer steps has a multiple of it, so that no element is computed by another kind of kernel
than at the other stages, whose last bit may differ."""
RECORD: Final = "_shard_record"
"""Under this name a sharded parameter has its record; a gathered one has it too."""
PROPERTIES: Final = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "grad",
        "grad_dtype",
        "is_leaf",
        "grad_fn",
        "layout",
        "ndim",
        "is_sparse",
        "is_quantized",
        "is_meta",
        "names",
        "itemsize",
        "nbytes",
        "output_nr",
        "retains_grad",
        "is_nested",
        "_version",
        "_base",
        "is_cuda",
        "is_cpu",
        "is_xpu",
        "is_mps",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
    ]
)
"""Properties that can be answered without the values."""
METHODS: Final = frozenset(
    [
        "size",
        "dim",
        "numel",
        "nelement",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "stride",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "__hash__",
        "__dir__",
        "__len__",
        "storage_offset",
        "untyped_storage",
        "data_ptr",
        "is_inference",
        "is_shared",
        "is_pinned",
        "type",
        "get_device",
        "is_signed",
        "_has_compatible_shallow_copy_type",
        "is_same_size",
        "retain_grad",
        "has_names",
    ]
)
"""Methods that can be answered without the values."""
SHARD_WISE: Final = frozenset(("clone", "zeros_like", "ones_like", "empty_like", "full_like"))
"""What gives another tensor that is sharded alike."""
SHAPES: Final[Mapping[str, Callable[..., Tensor]]] = {
    "view_as": Tensor.view,
    "reshape_as": Tensor.reshape,
    "expand_as": Tensor.expand,
}
"""Methods whose other tensor gives a shape and nothing else."""


class ShardRecord(Protocol):
    """What is known of one sharded parameter, by the engine or by `zero.Init`."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    mesh: DeviceMesh
    """The ranks that share the parameter."""

    @property
    def dim(self) -> int:
        """The dimension that is cut, by torch.chunk's rule."""

    @property
    def stand(self) -> Tensor:
        """What has the shape of this rank's part, and perhaps no memory."""

    @property
    def shard(self) -> Tensor:
        """This rank's part, in its own memory, or a copy of one that rests elsewhere."""

    @property
    def is_gathered(self) -> bool:
        """Whether the parameter itself has its values now."""

    def copy(self) -> Tensor:
        """Another tensor with the same values, sharded alike."""

    def use(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer an operation on the values of this parameter, perhaps among others, or refuse it."""


class ShardedParameter(nn.Parameter):
    """The class of a parameter while it is sharded."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer facts; ask the record of the first sharded parameter for everything else."""
        kwargs = dict(kwargs or {})
        name = name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if name in METHODS or (name in PROPERTIES and len(args) == 1):
                return func(*args, **kwargs)
            if name == "__repr__":
                return f"ShardedParameter({_words(args[0])})"
            if name in SHAPES and not isinstance(args[0], ShardedParameter):
                return SHAPES[name](args[0], args[1].shape)
        found = [value for value in tensors_in((tuple(args), kwargs)) if isinstance(value, ShardedParameter)]
        return record_of(found[0]).use(func, name, tuple(args), kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Another tensor with the same values."""
        if id(self) not in memo:
            memo[id(self)] = record_of(self).copy()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A shard is saved as a DTensor, without the memory of its neighbours."""
        found: Any = as_dtensor(record_of(self)).clone()
        return found.__reduce_ex__(protocol)

    def to_local(self) -> Tensor:
        """This rank's shard, as a DTensor would give it."""
        return record_of(self).shard

    def full_tensor(self) -> Tensor:
        """The whole value, which all ranks ask for together, as a DTensor would give it."""
        return as_dtensor(record_of(self)).full_tensor()


def record_of(parameter: Tensor) -> ShardRecord:
    """What is known of a sharded parameter."""
    found: ShardRecord = vars(parameter)[RECORD]
    return found


def find_record(parameter: Any) -> ShardRecord | None:
    """What is known of a parameter that is sharded between its uses; None for all others."""
    found: ShardRecord | None = vars(parameter).get(RECORD) if isinstance(parameter, nn.Parameter) else None
    return found


def is_sharded(parameter: Any) -> bool:
    """Whether a parameter is sharded between its uses, although it may be gathered now."""
    return find_record(parameter) is not None


def as_dtensor(record: ShardRecord) -> DTensor:
    """A shard as a DTensor, which shares its memory."""
    check_here(record.stand, f"'{record.name}'")
    stride = torch.empty(record.shape, device="meta").stride()
    with torch.no_grad():
        return DTensor.from_local(
            record.shard, record.mesh, [Shard(record.dim)], run_check=False, shape=record.shape, stride=stride
        )


def with_dtensors(values: Any) -> Any:
    """A copy of these arguments with DTensors for sharded parameters."""
    return change_tensors(
        values, lambda each: as_dtensor(record_of(each)) if isinstance(each, ShardedParameter) else each
    )


def check_gradient(label: str, func: Any, name: str, args: Sequence[Any]) -> None:
    """Refuse to ask autograd for the gradient of a shard, and to put a whole one there."""
    if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
        raise UsageError(
            f"torch.autograd.{name}() for '{label}' alone, of which this rank holds a shard: call backward for all "
            "parameters and read mizzen.zero.safe_get_full_grad. Gradients of inputs alone can be asked for"
        )
    if name == "grad" and len(args) == 2 and args[1] is not None:
        raise UsageError(
            f"'{label}' is sharded, and so is its gradient, which is not kept in .grad: set it with "
            "mizzen.zero.safe_set_full_grad, between backward and step"
        )


def use_refusal(label: str, name: str) -> UsageError:
    """What is said of an operation on a sharded parameter outside of a forward pass."""
    return UsageError(f"{name}() on '{label}', of which this rank holds a shard, outside of a forward pass: {WAYS}")


def write_refusal(label: str, name: str) -> UsageError:
    """What is said of an operation that would write to a copy of a parameter, gathered for it alone."""
    return UsageError(
        f"{name}() on '{label}', of which this rank holds a shard: write to the parameters of its module inside "
        "mizzen.zero.GatheredParameters(..., modifier_rank=0), or use mizzen.zero.safe_set_full_fp32_param"
    )


def name_of(func: Any) -> str:
    """A function's name, or the property that a getter or setter is of."""
    name = str(getattr(func, "__name__", ""))
    if name in ("__get__", "__set__", "__delete__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return name


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """The whole of a parameter, and what of it is here; what some libraries hang on the parameter itself."""

    shape: tuple[int, ...]
    numel: int
    status: Literal["whole", "sharded", "gathered"]
    """Whole for those that are never sharded; gathered for a sharded one that has its values now."""
    local_numel: int
    """Elements on this rank."""


def facts_of(parameter: Tensor) -> ParameterFacts:
    """Ask without touching its values."""
    expect(parameter, Tensor, "a parameter")
    record, shape = find_record(parameter), tuple(parameter.shape)
    if record is None:
        return ParameterFacts(shape, parameter.numel(), "whole", parameter.numel())
    status: Literal["sharded", "gathered"] = "gathered" if record.is_gathered else "sharded"
    return ParameterFacts(tuple(record.shape), record.shape.numel(), status, record.stand.numel())


def _words(parameter: Any) -> str:
    record = record_of(parameter)
    return f"'{record.name}', shape={list(record.shape)}, dtype={parameter.dtype}, device={parameter.device}"


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """The dimension that is cut: the first, unless it is shorter than the ranks are many and another one divides."""
    if shape[0] >= ranks:
        return 0
    return next((dim for dim, size in enumerate(shape) if size and size % ranks == 0), 0)


def chunk(size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Where this rank's part of a dimension begins and ends, by torch.chunk's rule."""
    each = -(-size // mesh.size())
    first = min(mesh.get_local_rank() * each, size)
    return first, min(first + each, size)


def padded_length(shape: torch.Size, ranks: int) -> int:
    """Elements of a shard, padding included."""
    dim = shard_dim(shape, ranks)
    return shape.numel() // shape[dim] * -(-shape[dim] // ranks)


def whole_view(memory: Tensor, shape: torch.Size) -> Tensor:
    """The whole parameter in memory that may be padded at its end; writes to it are not writes to the memory's."""
    return memory[: shape.numel()].view(shape).data


def up(count: int) -> int:
    """The next multiple."""
    return -(-count // MULTIPLE) * MULTIPLE


def gather_shards(
    shard: Tensor,
    shape: Sequence[int],
    dim: int,
    group: ProcessGroup,
    *,
    dtype: torch.dtype | None = None,
    tag: Tag | None = None,
) -> Tensor:
    """The tensor of this shape that the ranks of a group have cut along `dim`, by torch.chunk's rule."""
    check_here(shard, "a sharded parameter")
    ranks, sizes = groups.get_world_size(group), list(shape)
    sizes[dim] = -(-shape[dim] // ranks)
    mine = shard.new_zeros(sizes, dtype=dtype or shard.dtype)
    mine.narrow(dim, 0, shard.shape[dim]).copy_(shard)
    every = mine.new_empty([ranks, *sizes])
    collectives.all_gather_into_tensor(every.view(-1), mine.view(-1), group=group, tag=tag)
    return joined(every, shape, dim)


def joined(rows: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """The tensor of this shape whose parts along `dim`, padded to one size, are these rows, one for each rank."""
    sizes = list(shape)
    sizes[dim] = -(-shape[dim] // len(rows))
    every = rows.reshape(len(rows), *sizes)
    # Along the first dimension this is no copy.
    whole = every.flatten(0, 1) if dim == 0 else torch.cat(every.unbind(0), dim)
    return whole.narrow(dim, 0, shape[dim]).contiguous()


def rows_of(whole: Tensor, ranks: int, length: int, dtype: torch.dtype | None = None) -> Tensor:
    """A whole tensor as one row of `length` elements for each rank: its part, and zeros where that is shorter."""
    dim = shard_dim(whole.shape, ranks)
    if dim == 0 and whole.numel() == ranks * length:
        return whole.reshape(ranks, length).to(dtype or whole.dtype)
    rows = whole.new_zeros([ranks, length], dtype=dtype or whole.dtype)
    parts = torch.split(whole, -(-whole.shape[dim] // ranks), dim)
    for row, part in zip(rows, parts, strict=False):
        row[: part.numel()] = part.reshape(-1)
    return rows
