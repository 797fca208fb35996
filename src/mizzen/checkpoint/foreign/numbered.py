"""The states of a torch optimizer, which are kept under numbers, by the names of the parameters they belong to."""

from collections.abc import Mapping

from mizzen.checkpoint.foreign.align import align
from mizzen.checkpoint.foreign.collected import Collected, as_recipe
from mizzen.checkpoint.foreign.tree import entries, expect, tensors
from mizzen.checkpoint.foreign.values import TensorRef


def add_numbered(
    source: Collected, model: object, optimizer: Mapping[str, object], *, skip: set[str], where: str
) -> None:
    """The states of a plain torch optimizer, if shapes leave no doubt about which parameter each number means."""
    states = expect(optimizer.get("state"), dict, f"{where}: the optimizer's state")
    groups = expect(optimizer.get("param_groups"), list, f"{where}: param_groups")
    numbers = [expect(entries(group, where).get("params"), list, f"{where}: params") for group in groups]
    if not states:
        return
    shapes: list[list[tuple[int, ...]]] = []
    for group in numbers:
        found = [_shape_of_state(states.get(number)) for number in group]
        if any(shape is None for shape in found):
            source.left_out.append("optimizer states: some parameters have none, so their numbers mean nothing here")
            return
        shapes.append([shape for shape in found if shape is not None])
    names = _named_groups(groups) or align(_parameters(model, skip, where), shapes)
    if names is None or [*map(len, names)] != [*map(len, numbers)]:
        source.left_out.append(
            "optimizer states: they are numbered, and the shapes do not say which parameter each number means"
        )
        return
    for group_names, group in zip(names, numbers, strict=True):
        for name, number in zip(group_names, group, strict=True):
            for kind, value in entries(states[number], where).items():
                if (recipe := as_recipe(value)) is not None:
                    source.add(kind, name, recipe, where=where)


def _named_groups(groups: list[object]) -> list[list[str]] | None:
    """The names that torch keeps when an optimizer was made from `named_parameters()`."""
    found = [group.get("param_names") for group in groups if isinstance(group, dict)]
    if not found or not all(isinstance(names, list) for names in found):
        return None
    return [[str(name) for name in names] for names in found if isinstance(names, list)]


def _shape_of_state(state: object) -> tuple[int, ...] | None:
    """The shape of a parameter, by its states."""
    values = state.values() if isinstance(state, dict) else ()
    return next((value.shape for value in values if isinstance(value, TensorRef) and value.shape), None)


def _parameters(model: object, skip: set[str], where: str) -> dict[str, tuple[int, ...]]:
    """A model's parameters, each once: names that share their bytes with an earlier one are the same parameter."""
    seen, found = set(), {}
    for name, ref in tensors(model, where)[0].items():
        place = (ref.storage.extent, ref.offset, ref.shape)
        if name not in skip and place not in seen:
            found[name] = ref.shape
        seen.add(place)
    return found
