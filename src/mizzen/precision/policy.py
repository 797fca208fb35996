"""The dtypes of a run as one frozen value. Casting tensors is done by whoever holds them."""

from dataclasses import dataclass
from typing import Final

from mizzen.config.schema import Config

DTYPES: Final = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""The configuration's words in torch's."""

FLOATING: Final = ("float16", "bfloat16", "float32", "float64")
"""What can be trained, narrowest first; the first two are equally wide."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a run holds and sends, in torch's names; None leaves a dtype as it is."""

    parameters: str | None
    accumulation: str
    """Of gradients, over micro-steps; those of wider parameters add up in the parameters' own dtype."""
    wire: str | None
    """In which gradients are summed over ranks; None is float32, or the dtype in which they add up if that is wider."""
    buffers: str | None = None
    masters: str = "float32"
    """What the optimizer's result is kept in; for wider parameters these themselves."""
    states: str = "float32"
    """What the optimizer computes and keeps its states in; at least as wide as the masters."""

    @classmethod
    def of(cls, config: Config) -> "Policy":
        """Read the policy out of a configuration."""
        bf16, fp16 = config.bf16, config.fp16
        low = "bf16" if bf16.enabled else "fp16" if fp16.enabled else None
        has_low_masters = bf16.bf16_master_weights_and_grads if bf16.enabled else fp16.fp16_master_weights_and_grads
        kept = low if low and has_low_masters else "fp32"
        wire, buffers = config.communication_data_type, config.data_types.buffer_dtype
        return cls(
            parameters=DTYPES[low] if low else None,
            accumulation=DTYPES[config.data_types.grad_accum_dtype or kept],
            wire=DTYPES[wire] if wire else None,
            buffers=DTYPES[buffers] if buffers else None,
            masters=DTYPES[kept],
            states=DTYPES[kept if bf16.bf16_optimizer_states else "fp32"],
        )

    def held(self, dtype: str) -> str:
        """The dtype in which a parameter of this dtype is held for compute."""
        return self.parameters if self.parameters and dtype in FLOATING else dtype


def wider(one: str, other: str) -> str:
    """The narrowest floating dtype that holds the values of both."""
    low, high = sorted((one, other), key=FLOATING.index)
    return "float32" if (low, high) == ("float16", "bfloat16") else high
