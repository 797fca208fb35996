"""The tensors in what a model is called with: nested dicts, tuples and lists, and whatever else is left as it is."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def change_tensors(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested inputs with every tensor changed, in the structure that they have."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, Mapping):
        return type(inputs)({key: change_tensors(value, change) for key, value in inputs.items()})  # type: ignore[call-arg]
    if isinstance(inputs, tuple | list):
        changed = [change_tensors(value, change) for value in inputs]
        kind = type(inputs)
        is_named = kind not in (tuple, list) and "_fields" in dir(kind)
        return kind(*changed) if is_named else kind(changed)
    return inputs


def tensors_in(inputs: Any) -> list[Tensor]:
    """Every tensor of a structure, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    change_tensors(inputs, note)
    return found
