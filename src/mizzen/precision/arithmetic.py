"""In what a model computes: its inputs, the operations of its forward, its loss. What is held is `policy.py`'s."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from mizzen.accelerator import Accelerator
from mizzen.config.schema import Config
from mizzen.errors import DeviceError
from mizzen.model.inputs import change_tensors
from mizzen.precision.scaler import LossScaler, Scaling

LOWER: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How the engine calls a model."""

    scaler: LossScaler
    device_type: str
    autocast: torch.dtype | None = None
    """In which operations that may be lower are done; None leaves that to the caller."""
    inputs: torch.dtype | None = None
    """What floating-point inputs are cast to; None leaves them as they are."""

    @classmethod
    def of(cls, config: Config, device_type: str) -> "Arithmetic":
        """Read it out of a configuration."""
        autocast, fp16 = config.torch_autocast, config.fp16
        return cls(
            LossScaler(Scaling.of(config)),
            device_type,
            autocast=LOWER[autocast.dtype] if autocast.enabled else None,
            inputs=torch.float16 if fp16.enabled and fp16.auto_cast else None,
        )

    def region(self) -> AbstractContextManager[Any]:
        """Where a model and its loss are computed. An autocast of the configuration prevails over one around it."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device_type, dtype=self.autocast)

    def call(self, module: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The module's own output."""
        if self.inputs is not None:
            args, kwargs = change_tensors(args, self._cast), change_tensors(kwargs, self._cast)
        with self.region():
            return module(*args, **kwargs)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.inputs) if tensor.is_floating_point() else tensor


def check_device(config: Config, accelerator: Accelerator) -> None:
    """Refuse a format in which the device does not compute."""
    for path, dtype in _asked(config):
        if not accelerator.supports(dtype):
            raise DeviceError(
                f"{path}: {accelerator.describe().name} ({accelerator.name}) does not compute in "
                f"{str(dtype).removeprefix('torch.')}: use another format, or leave the section out for fp32"
            )


def _asked(config: Config) -> Iterator[tuple[str, torch.dtype]]:
    if config.fp16.enabled:
        yield "fp16.enabled", torch.float16
    if config.bf16.enabled:
        yield "bf16.enabled", torch.bfloat16
    if config.torch_autocast.enabled:
        yield "torch_autocast.dtype", LOWER[config.torch_autocast.dtype]
