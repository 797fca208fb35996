"""Whether a device computes in a type, found out by doing so. What a recipe needs beyond that is `precision/`'s."""

import torch


@torch.no_grad()
def computes(device: torch.device, dtype: torch.dtype) -> bool:
    """Multiply a few ones and look at the result."""
    if is_float8(dtype):
        # Torch stores these anywhere and, in some versions, multiplies them one by one. They are of use only where
        # matrix units take them, and that is a fact about hardware: cuda.py has it.
        return False
    # Not a matrix product: with deterministic algorithms on, cuBLAS refuses those for a reason that is not the type.
    try:
        ones = torch.ones(8, dtype=dtype, device=device)
        return torch.equal(ones * ones, ones)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # says something about this moment, nothing about the type
    except (RuntimeError, TypeError):
        return False


def is_float8(dtype: torch.dtype) -> bool:
    """Whether a type is a float of eight bits or fewer."""
    return dtype.is_floating_point and dtype.itemsize == 1
