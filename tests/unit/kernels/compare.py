"""What an operation gives, forward and backward, and how far two of them are apart."""

import torch


def results(function, *tensors):
    """Outputs and gradients, for an incoming gradient that is no constant."""
    leaves = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in tensors]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(1)
    incoming = [torch.randn(output.shape).to(output.dtype) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, incoming)]


def assert_close(found, expected, bound):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype and one.shape == other.shape
        assert (one.double() - other.double()).abs().max() <= bound * other.double().abs().max()
