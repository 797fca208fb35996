"""The states of a torch optimizer, which are kept under numbers, by the names of the parameters they belong to."""

from collections.abc import Mapping

from mizzen.checkpoint.foreign.align import align
from mizzen.checkpoint.foreign.collected import Collected, as_recipe
from mizzen.checkpoint.foreign.tree import count_of, entries, expect, name_in, tensors
from mizzen.checkpoint.foreign.values import TensorRef
from mizzen.errors import CheckpointError


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


def with_masters(state: Mapping[str, object], where: str) -> Mapping[str, object]:
    """The optimizer inside one that keeps fp32 masters in lists, group by group, with each master among its states."""
    inner = entries(state.get("optimizer_state_dict"), f"{where}: optimizer_state_dict")
    states = dict(expect(inner.get("state"), dict, f"{where}: state"))
    groups = expect(inner.get("param_groups"), list, f"{where}: param_groups")
    masters = expect(state.get("fp32_groups"), list, f"{where}: fp32_groups")
    if len(groups) != len(masters):
        raise CheckpointError(f"{where}: {len(masters)} groups of masters and {len(groups)} of parameters")
    for group, values in zip(groups, masters, strict=True):
        numbers = expect(entries(group, where).get("params"), list, f"{where}: params")
        if len(numbers) != len(expect(values, list, f"{where}: fp32_groups")):
            raise CheckpointError(f"{where}: {len(values)} masters for {len(numbers)} parameters of a group")
        for number, value in zip(numbers, values, strict=True):
            own = entries(states.get(count_of(number, f"{where}: params")), f"{where}: state")
            states[number] = {"master": value, **own}
    return {**inner, "state": states}


def _named_groups(groups: list[object]) -> list[list[str]] | None:
    """The names that torch keeps when an optimizer was made from `named_parameters()`."""
    found = [group.get("param_names") for group in groups if isinstance(group, dict)]
    if not found or not all(isinstance(names, list) for names in found):
        return None
    return [[name_in(name, "param_names") for name in names] for names in found if isinstance(names, list)]


def _shape_of_state(state: object) -> tuple[int, ...] | None:
    """The shape of a parameter, by its states."""
    values = state.values() if isinstance(state, dict) else ()
    return next((value.shape for value in values if isinstance(value, TensorRef) and value.shape), None)


def _parameters(model: object, skip: set[str], where: str) -> dict[str, tuple[int, ...]]:
    """A model's parameters, each once."""
    again = shared_names(model, where)
    return {name: ref.shape for name, ref in tensors(model, where)[0].items() if name not in skip and name not in again}


def shared_names(model: object, where: str) -> dict[str, str]:
    """Names that share their bytes with an earlier one, which is the same parameter: later -> earlier."""
    first: dict[object, str] = {}
    found = {}
    for name, ref in tensors(model, where)[0].items():
        place = (ref.storage.extent, ref.offset, ref.shape)
        if ref.numel and first.setdefault(place, name) != name:
            found[name] = first[place]
    return found
