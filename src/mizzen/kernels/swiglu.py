"""silu(gate) * up in one pass, forward and backward. Only the two inputs are kept; plain torch keeps silu(gate) too."""

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mizzen.kernels.gpu import gpu_code


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The specification: silu in fp32, rounded, then the product. The kernel rounds in the same places."""
    return functional.silu(gate) * up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """By a kernel on a GPU, by plain torch elsewhere. Both inputs have one shape and one dtype, or torch decides."""
    if gpu_code(gate) is None or not gate.is_floating_point() or gate.dtype.itemsize > 4:
        return plain_swiglu(gate, up)
    if gate.shape != up.shape or gate.dtype is not up.dtype:
        return plain_swiglu(gate, up)
    found: Tensor = _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return found


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        found: Tensor = _code(gate).swiglu(gate, up)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        by_gate, by_up = _code(gate).swiglu_backward(incoming, gate, up)
        return by_gate, by_up


def _code(tensor: Tensor) -> Any:
    return gpu_code(tensor)
