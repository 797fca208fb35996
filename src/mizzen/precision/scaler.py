"""The factor that keeps small fp16 gradients from vanishing, and the rules by which it moves. One for every stage.

Gradients are multiplied by it through the loss, and divided by it again where they are clipped. Nothing here touches a
gradient: whether one overflowed is found out by whoever measures them.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from mizzen.config.schema import Config
from mizzen.errors import StepError, UsageError


@dataclass(frozen=True, slots=True)
class Scaling:
    """How losses are scaled; by default not at all."""

    initial: float = 1.0
    is_dynamic: bool = False
    window: int = 1000
    """Steps without overflow after which a dynamic scale is doubled."""
    hysteresis: int = 1
    """Overflows after which it is halved."""
    is_consecutive: bool = False
    """Whether only overflows in a row count; otherwise they add up until the scale is raised."""
    least: float = 1.0
    """An overflow at this scale cannot be answered."""

    @classmethod
    def of(cls, config: Config) -> "Scaling":
        """Read it out of a configuration: only fp16 needs it, in the parameters or under autocast."""
        fp16 = config.fp16
        if not config.computes_in_fp16:
            return cls()
        if fp16.loss_scale:
            return cls(fp16.loss_scale)
        return cls(
            initial=2.0**fp16.initial_scale_power,
            is_dynamic=True,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            is_consecutive=fp16.consecutive_hysteresis,
            least=fp16.min_loss_scale,
        )


@dataclass(frozen=True, slots=True)
class ScaleState:
    """Where a dynamic scale stands."""

    scale: float
    clean: int = 0
    """Steps since the last overflow, or since the scale was raised."""
    patience: int = 1
    """Overflows until the scale is halved."""


class LossScaler:
    """Scales losses; told after each step whether it was taken or skipped."""

    def __init__(self, settings: Scaling) -> None:
        self.settings = settings
        self.state = ScaleState(settings.initial, patience=settings.hysteresis)
        self.has_scaled = False
        """Whether there are gradients with the present scale; whoever forgets the gradients forgets this."""

    @property
    def scale(self) -> float:
        """The factor of the next loss."""
        return self.state.scale

    @property
    def is_on(self) -> bool:
        """Whether a loss that was not scaled gives wrong gradients."""
        return self.settings.is_dynamic or self.scale != 1

    def scaled(self, loss: Tensor) -> Tensor:
        """A loss as its backward needs it, in fp32 at least: an fp16 loss times the scale would be infinite."""
        self.has_scaled = True
        return loss if self.scale == 1 else loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.scale

    def may_cure(self, loss: float | None) -> bool:
        """Whether a lower scale can help: the gradients overflowed, and the loss, which is not scaled, did not."""
        return self.settings.is_dynamic and (loss is None or math.isfinite(loss))

    def taken(self) -> None:
        """A step was taken."""
        settings, state = self.settings, self.state
        if not settings.is_dynamic:
            return
        if state.clean + 1 >= settings.window:
            self.state = ScaleState(state.scale * 2, patience=settings.hysteresis)
        else:
            patience = settings.hysteresis if settings.is_consecutive else state.patience
            self.state = replace(state, clean=state.clean + 1, patience=patience)

    def skipped(self, reason: str) -> None:
        """A step was skipped, since gradients overflowed."""
        settings = self.settings
        if not settings.is_dynamic:
            return
        state = self.state = replace(self.state, clean=0)
        if state.patience > 1:
            self.state = replace(state, patience=state.patience - 1)
        elif state.scale > settings.least:
            self.state = replace(state, scale=max(state.scale / 2, settings.least))
        else:
            raise StepError(
                f"the loss scale is at its minimum, {settings.least:g}, and gradients still overflow: {reason}. "
                "Lower the learning rate, check the data, use bf16, or lower fp16.min_loss_scale"
            )

    def override(self, scale: float) -> None:
        """Fix the scale from here on; the rules no longer move it."""
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
            raise UsageError(f"a loss scale is a finite number above 0; this is {scale!r}")
        if self.has_scaled:
            raise UsageError(
                f"losses of this step are already scaled by {self.scale:g}: set another scale right after step()"
            )
        self.settings = Scaling(float(scale))
        self.state = ScaleState(float(scale))

    def state_dict(self) -> dict[str, float]:
        """Where the scale stands."""
        return asdict(self.state)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from there, within the present settings. A scale that is fixed is that of the configuration."""
        if self.settings.is_dynamic:
            self.state = ScaleState(
                scale=max(state["scale"], self.settings.least),
                clean=int(state["clean"]),
                patience=min(int(state["patience"]), self.settings.hysteresis),
            )
