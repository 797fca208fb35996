"""The dtypes of a run as one frozen value. Casting tensors is done by whoever holds them."""

from dataclasses import dataclass
from typing import Final

from mizzen.config.schema import Config

DTYPES: Final = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""The configuration's words in torch's."""

FLOATING: Final = frozenset({"float64", "float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class Policy:
    """What a run holds and sends, in torch's names; None leaves a dtype as it is."""

    parameters: str | None
    accumulation: str
    wire: str
    buffers: str | None = None

    @classmethod
    def of(cls, config: Config) -> "Policy":
        """Read the policy out of a configuration."""
        low = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else None
        accumulation = DTYPES[config.data_types.grad_accum_dtype or "fp32"]
        wire = config.communication_data_type
        return cls(
            parameters=DTYPES[low] if low else None,
            accumulation=accumulation,
            wire=DTYPES[wire] if wire else accumulation,
            buffers=DTYPES[config.data_types.buffer_dtype] if config.data_types.buffer_dtype else None,
        )

    def held(self, dtype: str) -> str:
        """The dtype in which a parameter of this dtype is held for compute."""
        return self.parameters if self.parameters and dtype in FLOATING else dtype
