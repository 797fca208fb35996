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


def awkward_rows(count):
    """Rows to quantize: of all sizes, of zeros, and with numbers halfway between two integers of an 8-bit scale."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(6, count, generator=generator) * torch.tensor([[1e-30], [1e-3], [1.0], [1e3], [1e30], [0.0]])
    halves = torch.randint(-253, 254, (1, count), generator=generator) / 2
    halves[0, ::128] = 127.0
    return torch.cat([rows, halves])
