"""mizzen's loss scaler, made and told of overflows as other programs do it."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mizzen.errors import UsageError
from mizzen.precision import scaler
from mizzen.precision.scaler import Scaling


class LossScalerBase(scaler.LossScaler):
    """A factor, and what is done with it."""

    raise_error_at_min_scale = True
    cur_iter = 0
    """Steps since it was made, or since its engine was."""
    last_overflow_iter = -1
    """The number of the last of them that overflowed."""

    def __init__(self, cur_scale: float) -> None:
        super().__init__(Scaling(_factor(cur_scale)))

    @property
    def cur_scale(self) -> float:
        """The factor of the next loss."""
        return self.scale

    loss_scale = cur_scale

    def taken(self) -> None:
        """A step was taken."""
        super().taken()
        self.cur_iter += 1

    def skipped(self, reason: str) -> None:
        """A step was skipped, since gradients overflowed."""
        self.last_overflow_iter, self.cur_iter = self.cur_iter, self.cur_iter + 1
        super().skipped(reason)

    @property
    def scale_window(self) -> int:
        """Steps without overflow after which a dynamic factor is doubled."""
        return self.settings.window

    @property
    def scale_factor(self) -> float:
        """What it is multiplied with, or divided by."""
        return 2.0

    @property
    def min_scale(self) -> float:
        """The least factor."""
        return self.settings.least

    @property
    def delayed_shift(self) -> int:
        """Overflows after which it is halved."""
        return self.settings.hysteresis

    @property
    def cur_hysteresis(self) -> int:
        """Overflows until it is halved."""
        return self.state.patience

    @property
    def consecutive_hysteresis(self) -> bool:
        """Whether only overflows in a row count."""
        return self.settings.is_consecutive

    @property
    def dynamic(self) -> bool:
        """Whether it moves by itself."""
        return self.settings.is_dynamic

    def update_scale(self, overflow: bool) -> None:
        """A step was taken, or skipped since gradients overflowed."""
        self.has_scaled = False
        is_last = self.state.patience <= 1 and self.scale <= self.settings.least
        if not overflow:
            self.taken()
        elif self.raise_error_at_min_scale or not is_last:
            self.skipped("update_scale was told so")

    def scale_loss(self, loss: Tensor) -> Tensor:
        """A loss as its backward needs it."""
        return self.scaled(loss)

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        """Gradients times the factor, for a hook."""
        return tuple(self.scale * gradient for gradient in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Gradients of the scaled loss."""
        torch.autograd.backward(self.scaled(loss), retain_graph=retain_graph)


class LossScaler(LossScalerBase):
    """A factor that is fixed."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Nobody looks: the factor would not move."""
        return False


class DynamicLossScaler(LossScalerBase):
    """A factor that is halved after overflows and doubled after steps without any."""

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        self.raise_error_at_min_scale = raise_error_at_min_scale
        scaler.LossScaler.__init__(
            self,
            Scaling(
                initial=_factor(init_scale),
                is_dynamic=True,
                window=scale_window,
                hysteresis=delayed_shift,
                is_consecutive=consecutive_hysteresis,
                least=min_scale,
            ),
        )

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient is not finite."""
        return any(each.grad is not None and not bool(each.grad.isfinite().all()) for each in params)


def CreateLossScaler(  # noqa: N802
    dtype: torch.dtype, static_loss_scale: float, dynamic_scaling: bool, dynamic_loss_args: Mapping[str, Any] | None
) -> LossScalerBase:
    """The scaler of a dtype: only fp16 needs a factor."""
    if dtype != torch.half:
        return LossScaler()
    if not dynamic_scaling:
        return LossScaler(static_loss_scale)
    if dynamic_loss_args is None:
        raise UsageError("a dynamic loss scale needs dynamic_loss_args: init_scale, scale_window, min_scale, ...")
    return DynamicLossScaler(dtype=dtype, **dynamic_loss_args)


def dress(engine_s: scaler.LossScaler) -> None:
    """Give the scaler of an engine the wider class."""
    engine_s.__class__ = DynamicLossScaler if engine_s.settings.is_dynamic else LossScaler


def _factor(scale: float) -> float:
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < float("inf"):
        raise UsageError(f"a loss scale is a finite number above 0; this is {scale!r}")
    return float(scale)
