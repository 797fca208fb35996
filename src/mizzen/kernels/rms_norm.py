"""RMSNorm as torch has it: one kernel on a GPU, forward and backward, which keeps the input and one number per row.

A kernel of our own would do nothing better. Models written out in plain torch round once more, before the product with
the weight.
"""

import torch
from torch import Tensor
from torch.nn import functional


def plain_rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The specification, as Llama has it: normalized in fp32 at least, rounded, multiplied with the weight."""
    wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(inputs.dtype)


def rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`plain_rms_norm`, rounded once. torch's kernel takes one dtype, so the narrower of two is widened."""
    dtype = torch.promote_types(inputs.dtype, weight.dtype)
    return functional.rms_norm(inputs.to(dtype), weight.shape, weight.to(dtype), eps).to(dtype)
