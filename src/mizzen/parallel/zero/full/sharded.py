"""The classes of parameter objects at stage 3: one that holds a shard, one that was replaced, one that is elsewhere.

A sharded parameter is a DTensor. Left to itself it computes with its shard, or fails in the middle of torch with "mixed
torch.Tensor and DTensor". Here touching it is answered with its name and a way out, and inside a forward pass by
gathering it.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mizzen.errors import UsageError
from mizzen.model.inputs import change_tensors
from mizzen.model.piece import Piece, copy_overlap, piece_of_whole
from mizzen.model.placement import piece_of_tensor
from mizzen.parallel.zero.full.frozen import Packed

WAYS: Final = (
    "use it inside the model's forward, or in a method that is called on the engine; gather it with "
    "mizzen.zero.GatheredParameters; or read and write it with mizzen.zero.safe_get_full_fp32_param and "
    "safe_set_full_fp32_param"
)
FACTS: Final = frozenset(
    {
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
    }
)
"""Properties that anybody may ask for; that of a whole parameter where there is a difference."""
CALLS: Final = frozenset(
    {
        "size",
        "dim",
        "numel",
        "nelement",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "stride",
        "detach",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "to_local",
        "full_tensor",
        "redistribute",
        "__hash__",
        "__repr__",
        "__dir__",
        "__len__",
        "untyped_storage",
        "storage_offset",
        "data_ptr",
        "is_inference",
        "is_shared",
        "is_pinned",
        "type",
        "get_device",
        "is_signed",
        "_has_compatible_shallow_copy_type",
        "is_same_size",
        "__reduce_ex__",
        "retain_grad",
        "has_names",
    }
)
"""Methods and functions likewise."""
HOOKS: Final = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
"""Methods that are meant for the gradient that autograd computes here, before it is summed over the ranks."""
ALIKE: Final = frozenset({"to", "clone", "__deepcopy__", "zeros_like", "ones_like", "empty_like", "full_like", "cpu"})
"""What gives another tensor that is sharded alike."""
VIEWS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "view_as": Tensor.view,
    "reshape_as": Tensor.reshape,
    "expand_as": Tensor.expand,
}
"""What only asks for a shape."""
WRITES: Final = re.compile(r"[a-z]\w*[a-z0-9]_|__setitem__")
"""What changes its first tensor; `copy_` is answered before that."""


class Sharded(DTensor):
    """This rank's shard of a parameter. Each parameter has a class of its own, which knows its name."""

    label: ClassVar[str] = ""
    make_whole: ClassVar[Callable[[Tensor, str], Tensor] | None] = None
    """Makes it whole where that is allowed, with a gradient that finds its way back; raises otherwise."""
    stand_in: ClassVar[Tensor | None] = None
    """The object that stands in the module while it is gathered, on which autograd works."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer facts, take in a whole value, and gather or refuse everything else."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            name = property_of(func)
            if name in HOOKS and isinstance(args[0], Sharded) and args[0].stand_in is not None:
                return func(args[0].stand_in, *args[1:], **kwargs)
            _check_gradient(cls.label, func, name, args)
            if name == "__reduce_ex__":  # as a DTensor, without the memory of its neighbours
                return func(DTensor.clone(args[0].detach()), *args[1:])
            if name in ("detach", "data"):
                return _same(func, args)
            if name in FACTS or name in CALLS:
                return func(*args, **kwargs)
            if name in VIEWS and not isinstance(args[0], Sharded):
                return VIEWS[name](args[0], args[1].shape)
            tensors = [value for value in args if isinstance(value, Tensor)]
            if name == "copy_" and isinstance(args[0], Sharded):
                return _copy(*args, **kwargs)
            if all(isinstance(value, DTensor) for value in tensors) and name in ALIKE:
                return func(*args, **kwargs)
            if WRITES.fullmatch(name) or "out" in kwargs:
                written = kwargs.get("out", next(iter([*args, kwargs.get("tensor")])))
                if isinstance(written, Sharded):
                    raise write_refusal(type(written).label, name)
                if all(isinstance(value, DTensor) for value in tensors):  # an average of shards that somebody keeps
                    return func(*args, **kwargs)
            args, kwargs = change_tensors((tuple(args), dict(kwargs)), partial(_whole, name))
        return func(*args, **kwargs)


def _check_gradient(label: str, func: Any, name: str, args: Sequence[Any]) -> None:
    """Refuse to ask autograd for the gradient of a shard, and to put a whole one there."""
    if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
        raise UsageError(
            f"torch.autograd.{name}() for '{label}' alone, of which this rank holds a shard: call backward for all "
            "parameters and read mizzen.zero.safe_get_full_grad. Gradients of inputs alone can be asked for"
        )
    if name == "grad" and len(args) == 2 and not isinstance(args[1], DTensor | None):
        raise UsageError(
            f"'{label}' is sharded, and so is its gradient, which is not kept in .grad: set it with "
            "mizzen.zero.safe_set_full_grad, between backward and step"
        )


class Gone:
    """A parameter object that is no longer the model's: touching it says what to use instead."""

    label: ClassVar[str] = ""
    event: ClassVar[str] = ""

    @classmethod
    def refusal(cls) -> UsageError:
        """What it says."""
        return UsageError(
            f"this object was the parameter '{cls.label}' before {cls.event}, and is empty now: take it from the model "
            f"again. To use its values, {WAYS}"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse."""
        raise cls.refusal()


class Moved(Gone, nn.Parameter):
    """One that was whole, and is empty."""


class MovedShard(Gone, DTensor):
    """One that was a shard."""


class Elsewhere(Sharded):
    """A sharded parameter while the whole one stands in its place in the module."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer facts, refuse the rest."""
        name = property_of(func)
        if name in FACTS or name in CALLS - {"detach"}:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise UsageError(
            f"this object is a shard of '{cls.label}', which is gathered now: inside GatheredParameters take the whole "
            "parameter from its module"
        )


def refusal(label: str, name: str) -> UsageError:
    """What is said of an operation on a sharded parameter."""
    return UsageError(f"{name}() on '{label}', of which this rank holds a shard, outside of a forward pass: {WAYS}")


def write_refusal(label: str, name: str) -> UsageError:
    """What is said of an operation that would write to a copy of a parameter, gathered for it alone."""
    return UsageError(
        f"{name}() on '{label}', of which this rank holds a shard: write to the parameters of its module inside "
        "mizzen.zero.GatheredParameters(..., modifier_rank=0), or use mizzen.zero.safe_set_full_fp32_param"
    )


def _whole(name: str, value: Tensor) -> Tensor:
    """A whole parameter for a shard, where an operation may have it."""
    if not isinstance(value, Sharded):
        return value
    gather = type(value).make_whole
    if gather is None:
        raise AssertionError(f"'{type(value).label}' was marked without a way to gather it")
    return gather(value, name)


def mark(parameter: Tensor, label: str, gather: Callable[[Tensor, str], Tensor], stand_in: Tensor) -> None:
    """Make a DTensor answer as a sharded parameter."""
    facts = {"label": label, "make_whole": staticmethod(gather), "stand_in": stand_in}
    parameter.__class__ = type("Sharded", (Sharded,), facts)


def set_aside(parameter: Tensor) -> None:
    """Let a marked parameter say that it is gathered."""
    label = type(parameter).label  # type: ignore[attr-defined]
    parameter.__class__ = type("Elsewhere", (Elsewhere,), {"label": label, "before": type(parameter)})


def bring_back(parameter: Tensor) -> None:
    """Undo `set_aside`."""
    parameter.__class__ = type(parameter).before  # type: ignore[attr-defined]


def unmark(parameter: Tensor) -> None:
    """Make it a plain DTensor again, with the hooks that the object in its place had."""
    stand_in = type(parameter).stand_in  # type: ignore[attr-defined]
    parameter.__class__ = DTensor
    carry_hooks(stand_in, parameter)


def move(parameter: Tensor, label: str, event: str = "mizzen.initialize sharded it") -> None:
    """Empty a parameter that was replaced; a shard cannot be emptied."""
    facts = {"label": label, "event": event}
    if isinstance(parameter, DTensor):
        parameter.__class__ = type("MovedShard", (MovedShard,), facts)
        return
    parameter.grad = None
    parameter.data = parameter.data.new_empty(0)
    parameter.__class__ = type("Moved", (Moved,), facts)


def property_of(func: Any) -> str:
    """A function's name, or the property that a getter or setter is of."""
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
        return str(getattr(owner, "__name__", ""))
    return str(getattr(func, "__name__", ""))


def _same(func: Any, args: Sequence[Any]) -> Any:
    """The same shard as another object; torch would reduce a plain DTensor to the number of this rank alone."""
    if len(args) == 2 and not isinstance(args[1], DTensor):
        raise write_refusal(type(args[0]).label, "data")
    found = func(*args)
    if len(args) == 1 and isinstance(found, DTensor):
        found.__class__ = type(args[0])
    return found


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What `load_state_dict` does: a whole tensor is cut as the parameter is, and every rank takes its own part."""
    if isinstance(source, DTensor):
        with torch.no_grad():
            DTensor.copy_(target, source, non_blocking)
        return target
    if not isinstance(target, DTensor):
        raise AssertionError(f"a sharded parameter is a {type(target).__name__}")
    if source.shape != target.shape:
        raise UsageError(
            f"'{type(target).label}' has shape {list(target.shape)}; the value given has {list(source.shape)}"  # type: ignore[attr-defined]
        )
    write_shard(target, source)
    return target


def write_shard(target: DTensor, source: Tensor) -> None:
    """Give a shard its part of a whole value."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        packed = target.to_local()
        if isinstance(packed, Packed):
            part, values = piece_of_tensor("", target), packed.values()
            copy_overlap(piece_of_whole("", source), Piece("", part.shape, part.boxes, values))
            packed.write(values)
        else:
            copy_overlap(piece_of_whole("", source), piece_of_tensor("", target))


def carry(old: Tensor, new: Tensor) -> None:
    """Give a parameter the attributes and hooks that somebody has hung on the one before it."""
    own = vars(new)
    own.update({key: value for key, value in vars(old).items() if key not in own})
    carry_hooks(old, new)


def carry_hooks(old: Any, new: Any) -> None:
    """Move the hooks on a gradient to another object; who has registered them can still remove them."""
    with torch._C.DisableTorchFunctionSubclass():
        for each in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(old, each):
                setattr(old, each, None)
                setattr(new, each, hooks)
