"""In which number formats a model computes, accumulates and communicates: `fp16`, `bf16`, `torch_autocast`, `amp`."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from mizzen.config.section import (
    Count,
    Dtype,
    Flag,
    Name,
    NotNegative,
    OpenSection,
    Positive,
    Section,
    Words,
    no_effect,
    refused,
    whole,
)

_Power = Annotated[int, Field(ge=0, le=126), BeforeValidator(whole), Words("whole number 0..126")]


class Fp16Config(Section):
    """Half precision with fp32 masters and loss scaling."""

    enabled: Flag = False
    """Hold parameters and compute in fp16."""
    auto_cast: Flag = False
    """Cast floating-point inputs of the model to fp16."""
    loss_scale: NotNegative = 0.0
    """A fixed loss scale; 0 means a dynamic one."""
    initial_scale_power: _Power = 16
    """The dynamic scale starts at 2 to this power."""
    loss_scale_window: Count = 1000
    """Steps without overflow after which the dynamic scale is doubled."""
    hysteresis: Count = 2
    """Overflows after which the dynamic scale is halved."""
    consecutive_hysteresis: Flag = False
    """Count only overflows in a row; otherwise the count starts again when the scale is raised."""
    min_loss_scale: Positive = 1.0
    """Least dynamic scale; an overflow at this scale is an error."""
    fp16_master_weights_and_grads: Flag = False
    """Keep masters and gradients in fp16 as well, for sharded optimizer states, which stay in fp32."""
    fused_mode: Flag = no_effect(True, "the optimizer step is fused wherever the device can do it")
    """Use the fused fp16 optimizer."""


class Bf16Config(Section):
    """Brain floating point with fp32 masters; it needs no loss scaling."""

    enabled: Flag = False
    """Hold parameters and compute in bf16."""
    check_grad_overflow: Flag = no_effect(True, "a step whose gradients are not finite is always skipped, and said")
    """Whether to look for gradients that are not finite."""
    bf16_master_weights_and_grads: Flag = False
    """Keep masters and gradients in bf16 as well, for sharded optimizer states."""
    bf16_optimizer_states: Flag = False
    """Keep the moments in bf16 as well; needs bf16 masters."""
    immediate_grad_update: Flag = no_effect(False, "gradients are added to the fp32 sum as soon as they appear")
    """Add each gradient to its fp32 sum inside the backward pass."""


class AmpConfig(OpenSection):
    """Mixed precision by NVIDIA apex; further keys were arguments of `apex.amp.initialize`."""

    enabled: Flag = refused(False, "apex has been replaced by torch itself; use torch_autocast, bf16 or fp16")
    """Hand the model to apex."""


class AutocastConfig(Section):
    """torch's own mixed precision: parameters stay as they are, operations choose their format."""

    enabled: Flag = False
    """Run the model under `torch.autocast`."""
    dtype: Dtype = "bf16"
    """Format of the operations that may be lower; with fp16, losses are scaled as section fp16 says."""
    lower_precision_safe_modules: tuple[Name, ...] | None = no_effect(
        None, "torch chooses by operation, and gradients travel in communication_data_type"
    )
    """Classes whose gradients travel in the lower format."""


class DataTypesConfig(Section):
    """Formats that differ from the one the model computes in."""

    grad_accum_dtype: Dtype | None = None
    """Format in which gradients accumulate over micro-steps; absent means fp32."""
    param_dtype: Dtype | None = no_effect(None, "it can only repeat the enabled precision, and is checked against it")
    """Format of the parameters."""
    buffer_dtype: Dtype | None = None
    """Format of the model's buffers; absent leaves them as they are."""
