"""Where a rewrite changes a model: which blocks it takes, and what stands in the place of a module's `forward`."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from mizzen.errors import PlanError
from mizzen.model.blocks import Block, Blocks
from mizzen.model.sketch import Sketch
from mizzen.wording import counted


class ReplacedForward:
    """A callable in a module's own `__dict__`, under the name `forward`. No class and no other model is changed."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.__wrapped__ = forward  # where inspect.signature looks


def restore(model: nn.Module, kind: type[ReplacedForward] = ReplacedForward) -> None:
    """Give every module the `forward` back that it had before one of this kind, or several, took its place."""
    for module in model.modules():
        own = vars(module)
        while isinstance(standing := own.get("forward"), kind):
            del own["forward"]
            if module.forward != standing.__wrapped__:  # somebody else's, put there before us
                own["forward"] = standing.__wrapped__


def called_blocks(sketch: Sketch, choice: Sequence[str], *, key: str) -> tuple[Block, ...]:
    """The blocks of a model, or those of the user's choice, which stands at `key`. None for a model without any."""
    try:
        units = Blocks.of(sketch, choice).units
    except PlanError as error:
        raise PlanError(f"{key}: {error}") from None
    for unit in units:
        if unit.kind in ("ModuleList", "ModuleDict"):
            raise PlanError(
                f"'{unit.path}' is a {unit.kind}, whose modules are called one by one and never as a whole: "
                f"name the modules to take in {key}"
            )
    return units


def in_words(units: Sequence[Block], *, among: int) -> str:
    """How many there are, of how many, and of which classes."""
    some = f"{len(units)} of " if len(units) < among else ""
    kinds = ", ".join(dict.fromkeys(unit.kind for unit in units))
    return f"{some}{counted(among, 'block')} ({kinds})"
