"""The way to the Triton kernels: they are imported when a tensor on a GPU asks for them, and never before."""

from importlib import import_module
from typing import Any

from torch import Tensor

from mizzen.errors import DeviceError


def gpu_code(tensor: Tensor) -> Any | None:
    """The kernels, for a tensor that lies where Triton can reach it; None elsewhere, where plain torch is the way."""
    if tensor.device.type != "cuda":
        return None
    try:
        return import_module("mizzen.kernels.triton_code")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise DeviceError(
            "the keys of 'fused', and quantized weights and gradients, need Triton on a GPU, which torch brings along "
            "on Linux and which is not installed: pip install triton, or leave them out"
        ) from None
