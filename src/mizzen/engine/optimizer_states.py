"""Optimizer states by parameter name, as Pieces, for any rule and any cut of the parameters among the ranks.

A state as large as its parameter is cut as the parameter is. One number for a stepped tensor is saved once for each
parameter in it. Any other shape belongs to a parameter that its rank holds whole. Low-bit states are saved as what they
mean, in fp32.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mizzen.checkpoint.read import Reader
from mizzen.checkpoint.write import Item
from mizzen.engine.model_changes import refuse_gathered
from mizzen.engine.weights import HeldItem, holders_of, saved
from mizzen.errors import CheckpointError, UsageError
from mizzen.log import warn_once
from mizzen.model.piece import piece_of_whole
from mizzen.offload.zenflow import CHANGE, GRADIENT, LATE_STATES
from mizzen.optim.rules import view_of
from mizzen.plan.parts import Store
from mizzen.wording import and_more

States = Mapping[Tensor, Mapping[str, Any]]
OF_THE_MACHINE: Final = frozenset(
    {"params", "param_names", "fused", "foreach", "capturable", "differentiable", "use_muon"}
)
"""Settings of a group that say with which parameters and how this run computes, not what."""
OF_THE_SCHEDULE: Final = frozenset({"lr", "initial_lr"})


def held_states(optimizer: Optimizer, stores: Sequence[Store], rank: int) -> Iterator[HeldItem]:
    """What to save of an optimizer."""
    for store in stores:
        holders = holders_of(store, rank)
        states = plain_states(optimizer.state, store)
        masters = (part for piece in store.pieces("master") for part, is_spare in saved(store, piece) if not is_spare)
        firsts = {part.name for part in masters if part.boxes and not any(part.boxes[0].start)}
        portions = store.contents.portions
        for key in dict.fromkeys(key for state in states.values() for key in state):
            pieces = store.pieces(key, states)
            whole = {piece.name for piece in pieces}
            for piece in pieces:
                yield from (HeldItem(Item(key, part), holders, is_spare=spare) for part, spare in saved(store, piece))
            for tensor, state in states.items():
                there = [portion for portion in portions[tensor] if portion.start < portion.stop]
                names = [portion.name for portion in there if portion.name not in whole]
                value = _as_tensor(state.get(key), key, names)
                if value is None or not names:
                    continue
                if value.dim() and len(names) > 1:
                    raise UsageError(
                        f"the optimizer state '{key}' has shape {list(value.shape)} and belongs to {len(names)} "
                        f"parameters, {and_more(names, 3)}: it cannot be saved by parameter"
                    )
                for name in names:
                    yield HeldItem(Item(key, piece_of_whole(name, value)), holders, is_spare=name not in firsts)


def plain_states(states: States, store: Store) -> dict[Tensor, dict[str, Any]]:
    """The states of what a store holds, without those that are not there, and low-bit ones as what they mean."""
    return {
        tensor: {key: _plain(value) for key, value in states.get(tensor, {}).items() if value is not None}
        for tensor in store.contents.portions
        if states.get(tensor)
    }


def _is_low_bit(value: Any) -> bool:
    return isinstance(value, Tensor) and type(value) is not Tensor and "dequantize" in dir(type(value))


def _plain(value: Any) -> Any:
    return value.dequantize().float() if _is_low_bit(value) and "OptimState" in type(value).__name__ else value


def _as_tensor(value: Any, key: str, names: Sequence[str]) -> Tensor | None:
    if value is None or type(value) is Tensor:
        return value
    if type(value) in (bool, int, float):
        return torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
    raise UsageError(
        f"the optimizer state '{key}' of {and_more(names, 2) or 'padding'} is a {type(value).__name__}, which a "
        "checkpoint does not keep: it keeps tensors and numbers"
    )


def fill_states(optimizer: Optimizer, stores: Sequence[Store], reader: Reader, names: Mapping[str, str]) -> list[str]:
    """Read the states of an optimizer that has them; returns what the checkpoint lacks.

    `names` has the parameters that are read, with what they are called in the checkpoint.
    """
    missing: list[str] = []
    there = {kind for kind, _ in reader.entries}
    _start_late_states(optimizer, stores, there)
    for store in stores:
        states, portions = plain_states(optimizer.state, store), store.contents.portions
        keys = dict.fromkeys(key for state in states.values() for key in state)
        for key in (key for key in keys if key in there or key not in LATE_STATES):
            pieces = store.pieces(key, states)
            for piece in pieces:
                stored = reader.find(key, names[piece.name]) if piece.name in names else None
                if stored is None or stored.shape != piece.shape:
                    missing.append(f"{key} of {piece.name}")
                else:
                    reader.fill(key, piece, stored.name)
            whole = {piece.name for piece in pieces}
            for tensor, state in states.items():
                held = [portion.name for portion in portions[tensor] if portion.start < portion.stop]
                is_padding = not held and isinstance(state.get(key), Tensor) and state[key].dim() > 0
                if key not in state or is_padding or whole.intersection(held):
                    continue
                called = {name: names.get(name, "") for name in held} or {"": reader.any_of(key)}
                known = [name for name in called.values() if reader.find(key, name)]
                missing += [f"{key} of {name}" for name, stored in called.items() if name and stored not in known]
                _fill_small(optimizer.state[tensor], key, known, reader)
        _put_back(optimizer.state, states)
    return missing


def _start_late_states(optimizer: Optimizer, stores: Sequence[Store], there: Collection[str]) -> None:
    """Let nothing wait for a late update in a run that goes on from one without such updates; say what is lost."""
    keys = {key for state in optimizer.state.values() for key in state if key in LATE_STATES and key not in there}
    for store in stores:
        for piece in (piece for key in keys for piece in store.pieces(key, optimizer.state)):
            piece.data.zero_()
            piece.changed()
    for state in optimizer.state.values():
        for key in keys.intersection(state):
            state[key].zero_()
    own = {key for state in optimizer.state.values() for key in state}
    if {GRADIENT, CHANGE}.intersection(there) - own:
        warn_once(
            "the checkpoint has gradients that wait for a late update of zenflow, or what one under way has changed: "
            "this run has no place for that, and drops it"
        )


def _fill_small(state: Any, key: str, names: Sequence[str], reader: Reader) -> None:
    """One value for all parameters of a stepped tensor."""
    if not names:
        return
    found = [reader.whole(key, name) for name in names]
    value = found[0]
    if value.numel() == 1 and any(not torch.equal(other, value) for other in found):
        value = max(found, key=float)
        warn_once(f"parameters that are stepped together were saved with different '{key}': the largest is taken")
    before = state[key]
    if not isinstance(before, Tensor):
        state[key] = type(before)(value.item())
    elif before.shape != value.shape:
        raise CheckpointError(
            f"the optimizer state '{key}' of '{names[0]}' has shape {list(value.shape)} in the "
            f"checkpoint and {list(before.shape)} here"
        )
    else:
        before.copy_(value)


def _put_back(states: Any, plain: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Low-bit states take over what was read for them."""
    for tensor, found in plain.items():
        for key, value in found.items():
            if states[tensor][key] is not value and _is_low_bit(states[tensor][key]):
                states[tensor][key].copy_(value)


def create_states(optimizer: Optimizer, stores: Sequence[Store]) -> None:
    """Let an optimizer make its states, by a step with gradients and rates of zero that changes nothing else."""
    refuse_gathered(stores)
    lots = [lot for store in stores for lot in store.contents.lots]
    for store in stores:
        store.clear_gradients()
    with _with_zero_rates(optimizer):
        for lot in (lot for lot in lots if lot.rest.place == "nvme"):  # one after the other, as memory has room for few
            view = view_of(optimizer, lot.tensors)
            lot.load()
            view.step()
            lot.rest.rest_states(lot.tensors, view.state)
            lot.unload()
            lot.rest.forget()
        here = [lot for lot in lots if lot.rest.place != "nvme"]
        for lot in here:
            lot.load()
        view_of(optimizer, [tensor for lot in here for tensor in lot.tensors]).step()
        for lot in here:
            lot.rest.rest_states(lot.tensors, optimizer.state)
            lot.unload()
    for store in stores:
        store.clear_gradients()


@contextmanager
def _with_zero_rates(optimizer: Optimizer) -> Iterator[None]:
    kept = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, kept, strict=True):
            group["lr"] = rate


def groups_of(optimizer: Optimizer, names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The settings of every group, and the parameters in it."""
    return [
        {
            "names": list(mine),
            "settings": {
                key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                for key, value in group.items()
                if key not in OF_THE_MACHINE
            },
        }
        for group, mine in zip(optimizer.param_groups, names, strict=True)
    ]


def set_groups(
    optimizer: Optimizer, names: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]], *, with_rates: bool
) -> None:
    """Give groups the settings that their parameters were saved with."""
    home = {name: number for number, each in enumerate(saved) for name in each["names"]}
    for group, mine in zip(optimizer.param_groups, names, strict=True):
        number = next((home[name] for name in mine if name in home), None)
        if number is None:
            continue
        for key, value in saved[number]["settings"].items():
            if key not in group or key in OF_THE_MACHINE or (key in OF_THE_SCHEDULE and not with_rates):
                continue
            if not _fits(value, group[key]):
                raise ValueError(
                    f"the optimizer's '{key}' is {str(value)[:80]!r}, and cannot be in place of {group[key]}"
                )
            group[key] = _in_place_of(group[key], value)


def _in_place_of(before: Any, value: Any) -> Any:
    """The value; a tensor stays the one that it was, on its device, and takes it over."""
    if isinstance(before, Tensor):
        return before.copy_(value) if isinstance(value, Tensor) else before.fill_(value)
    if isinstance(before, tuple | list):
        return type(before)(_in_place_of(one, other) for one, other in zip(before, value, strict=True))
    return value


def _fits(value: Any, before: Any) -> bool:
    """Whether what a file says can be in place of what is here: a number of a number, as many of several."""
    if isinstance(before, bool | str):
        return isinstance(value, int if isinstance(before, bool) else str)
    if isinstance(before, Tensor) and isinstance(value, Tensor):
        return before.shape == value.shape
    if isinstance(before, Number | Tensor):
        return isinstance(value, Number | Tensor) and not isinstance(value, bool)
    if isinstance(before, tuple | list):
        is_alike = isinstance(value, tuple | list) and len(value) == len(before)
        return is_alike and all(_fits(one, other) for one, other in zip(value, before, strict=True))
    return True
