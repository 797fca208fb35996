"""Masters that follow what somebody has written to the narrower values that a model computes with."""

from subprocess import SubprocessError
from typing import Final

import torch
from torch import Tensor

from mizzen.kernels.gpu import gpu_code
from mizzen.log import info_once

_CACHE: Final = 1 << 16
"""Elements that are looked at together on a CPU, so that what is rounded stays in cache."""


def plain_keep_writes(values: Tensor, masters: Tensor) -> None:
    """The specification: a value that is not its master rounded was written, and becomes the master."""
    is_written = values != masters.to(values.dtype)
    masters.copy_(torch.where(is_written, values.to(masters.dtype), masters))


def keep_writes(values: Tensor, masters: Tensor) -> None:
    """Let masters have the values that were written; one whose value is as it was keeps its low bits. Nothing waits.

    Both are flat and as long. A GPU reads both once, and writes what is new; a CPU looks at a stretch at a time.
    """
    if values.device.type == "cpu":
        for some, theirs in zip(torch.split(values, _CACHE), torch.split(masters, _CACHE), strict=True):
            if not torch.equal(some, theirs.to(some.dtype)):
                plain_keep_writes(some, theirs)
        return
    try:
        code = gpu_code(values)
        if code is not None and masters.dtype == torch.float32:
            code.keep_writes(values, masters)
            return
    except (RuntimeError, OSError, SubprocessError) as error:  # no Triton, or no compiler for what it makes
        info_once(f"weights are compared with their masters by plain torch, which takes longer: {error}")
    plain_keep_writes(values, masters)
