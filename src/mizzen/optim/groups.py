"""From what users give as `model_parameters` to parameter groups in which every parameter has a name and one place."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mizzen.errors import UsageError
from mizzen.log import warn_once


def param_groups(
    model: nn.Module, model_parameters: Iterable[Any] | None = None
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """(groups for an optimizer, parameter name -> its group). Parameters that are not trained are left out.

    Absent means all parameters of the model. Given are parameters, (name, parameter) pairs, or groups of either as
    dicts whose further keys are kept. A group without trained parameters stays, so that numbers and rates of the others
    do not shift; there is always one. A parameter that is reached by several paths is there once, under the first.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    placed: dict[str, int] = {}
    groups: list[dict[str, Any]] = []
    for number, given in enumerate(_as_groups(model, model_parameters)):
        kept: list[Tensor] = []
        for place, parameter in enumerate(_parameters_of(given, number)):
            name = names.get(id(parameter))
            if name is None:
                raise _not_in_the_model(model, parameter, number, place)
            if not parameter.requires_grad or placed.get(name) == number:
                continue
            if name in placed:
                raise UsageError(f"model_parameters: {name} is in group {placed[name]} and in group {number}: keep one")
            placed[name] = number
            kept.append(parameter)
        # Names that torch keeps beside the parameters would no longer match them.
        groups.append({key: value for key, value in given.items() if key != "param_names"} | {"params": kept})
    return groups, placed


def tell_slips(optimizer: Optimizer) -> None:
    """Warn of keys in groups that nobody reads and that look like an option of the optimizer. Others are the user's."""
    known = sorted(optimizer.defaults)
    for number, group in enumerate(optimizer.param_groups):
        for key in [key for key in group if key not in ("params", *known)]:
            if near := difflib.get_close_matches(str(key), known, n=1, cutoff=0.85):
                warn_once(
                    f"parameter group {number} has a key {key!r}, which {type(optimizer).__name__} does not read: "
                    f"did you mean '{near[0]}'?"
                )


def _as_groups(model: nn.Module, given: Iterable[Any] | None) -> list[Mapping[str, Any]]:
    if given is None:
        return [{"params": model.parameters()}]
    if isinstance(given, Tensor | Mapping) or not isinstance(given, Iterable):
        raise UsageError(
            f"model_parameters is one {type(given).__name__}; give an iterable of parameters or of groups, in a list"
        )
    entries = list(given)
    dicts = sum(isinstance(entry, Mapping) for entry in entries)
    if not dicts:
        return [{"params": entries}]
    if dicts < len(entries):
        raise UsageError(f"model_parameters mixes {dicts} groups with {len(entries) - dicts} single parameters")
    for number, entry in enumerate(entries):
        if "params" not in entry:
            raise UsageError(f"model_parameters: group {number} has no 'params', only {', '.join(map(str, entry))}")
    return entries


def _parameters_of(group: Mapping[str, Any], number: int) -> Iterator[Tensor]:
    params = group["params"]
    for place, entry in enumerate(
        [params] if isinstance(params, Tensor) or not isinstance(params, Iterable) else params
    ):
        parameter = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
        if not isinstance(parameter, Tensor):
            raise UsageError(
                f"model_parameters: entry {place} of group {number} is a {type(parameter).__name__}, no parameter"
            )
        yield parameter


def _not_in_the_model(model: nn.Module, parameter: Tensor, number: int, place: int) -> UsageError:
    shape = list(parameter.shape)
    alike = [name for name, own in model.named_parameters() if list(own.shape) == shape]
    hint = f"; of that shape the model has {', '.join(alike[:3])}" if alike else ""
    return UsageError(
        f"model_parameters: entry {place} of group {number}, of shape {shape}, is no parameter of the model{hint}. "
        "Take the parameters from the model after its last change"
    )
