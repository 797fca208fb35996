"""What there is to know of a parameter, whoever holds it: what some libraries hang on the parameter itself."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.distributed.tensor import DTensor

from mizzen.errors import expect
from mizzen.parallel.zero.full.live import local
from mizzen.parallel.zero.full.sharded import Elsewhere, Gone


@dataclass(frozen=True, slots=True)
class Facts:
    """The whole of a parameter, and what of it is here."""

    shape: tuple[int, ...]
    numel: int
    status: Literal["whole", "sharded", "gathered", "replaced"]
    """Whole for plain parameters; gathered for the sharded object while the whole one stands in its place."""
    local_numel: int
    """Elements on this rank."""


def facts_of(parameter: Tensor) -> Facts:
    """Ask without touching its values."""
    expect(parameter, Tensor, "a parameter")
    if isinstance(parameter, Gone):
        return Facts((), 0, "replaced", 0)
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Facts(shape, parameter.numel(), "whole", parameter.numel())
    status: Literal["gathered", "sharded"] = "gathered" if isinstance(parameter, Elsewhere) else "sharded"
    return Facts(shape, parameter.numel(), status, local(parameter).numel())
