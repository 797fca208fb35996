"""The blocks that a rewrite changes one by one: the repeated units of a model that are called as modules."""

from collections.abc import Sequence

from mizzen.errors import PlanError
from mizzen.model.blocks import Block, Blocks
from mizzen.model.sketch import Sketch


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
    count = f"{len(units)} of {among}" if len(units) < among else f"{among}"
    kinds = ", ".join(dict.fromkeys(unit.kind for unit in units))
    return f"{count} block{'s' if among > 1 else ''} ({kinds})"
