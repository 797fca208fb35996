"""What is known of update rules: what they need to see of a parameter, and which start with states.

A rule that works element by element gives the same result on any cut of a tensor, so it gets flat pieces of many
parameters. So does one that needs norms, if it can be told of them. All others get whole parameters.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim import Muon as TorchMuon
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from mizzen.config.optimizer import LOW_BIT
from mizzen.optim.guard import Guard
from mizzen.optim.own_rules import Lamb, Lion, Muon

ELEMENTWISE: Final = (Adam, AdamW, SGD, Adagrad, Adadelta, Adamax, NAdam, RAdam, RMSprop, Rprop, ASGD, Lion)

BY_PARAMETER: Final = (Muon, TorchMuon, Adafactor)
"""Rules that treat every parameter by itself, as a whole."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the rule is known to work element by element: it is one of torch's, or inherits its step from one."""
    return _steps_like(optimizer, ELEMENTWISE)


def is_known(optimizer: Optimizer) -> bool:
    """Whether the rule is known to treat each parameter by itself, so that ranks can share out the parameters."""
    return is_flat(optimizer) or _steps_like(optimizer, BY_PARAMETER)


def is_flat(optimizer: Optimizer) -> bool:
    """Whether the rule works on flat pieces of many parameters."""
    kind = type(optimizer)
    is_low_bit = kind.__name__ in LOW_BIT and kind.__module__.startswith("torchao.")
    return is_low_bit or _steps_like(optimizer, (*ELEMENTWISE, Lamb))


def whole_groups(optimizer: Optimizer) -> frozenset[int]:
    """The groups whose parameters the rule has to see whole."""
    if is_flat(optimizer):
        return frozenset()
    # In a group of Muon that says it is not for Muon, AdamW works.
    return frozenset(number for number, group in enumerate(optimizer.param_groups) if group.get("use_muon", True))


def is_adam(optimizer: Optimizer) -> bool:
    """Whether the rule is Adam or AdamW."""
    return _steps_like(optimizer, (Adam, AdamW))


def joins_parts(optimizer: Optimizer) -> bool:
    """Whether the rule can put a matrix together that is cut over tensor-parallel ranks, where it needs it whole."""
    return isinstance(optimizer, Muon)


@contextmanager
def scaled(optimizer: Optimizer, factor: float, device: torch.device) -> Iterator[float]:
    """Let the step multiply gradients with a factor, where its fused kernel can; yields what is left to multiply with.

    torch made this for loss scales: it divides by `grad_scale`, in the pass that it makes over gradients anyway.
    """
    if factor in (0.0, 1.0) or not _has_kernel(optimizer, (Adam, AdamW, SGD)):
        yield factor
        return
    known = torch.full((), factor, dtype=torch.float64, device=device)
    with decided(optimizer, known, torch.zeros_like(known)):
        yield 1.0


def decides(optimizer: Optimizer) -> bool:
    """Whether the step can be left out on the device, where `decided` says so, without a trace.

    SGD's kernel would leave momentum behind that nothing was written to, and hooks are for steps that are taken.
    """
    return _has_kernel(optimizer, (Adam, AdamW)) and not _has_hooks(optimizer)


def why_not_apart(optimizer: Optimizer) -> str:
    """Why the rule cannot step some parameters first and the others later; empty if it can, to the same bits."""
    if _steps_like(optimizer, (Lamb,)):
        return "adds up the norms of all parameters over the ranks in one call"
    if isinstance(optimizer, Muon) and optimizer.joined:
        return "puts matrices together over tensor-parallel ranks, all in one call"
    if not is_known(optimizer):
        return "is not known to treat each parameter by itself"
    if _has_hooks(optimizer):
        return "has hooks, which are for whole steps"
    return ""


@contextmanager
def only(optimizer: Optimizer, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let a step see some of the parameters. Groups keep their settings, and the other parameters their states."""
    wanted, groups = set(map(id, tensors)), optimizer.param_groups
    everything = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [each for each in group["params"] if id(each) in wanted]
    try:
        yield
    finally:
        for group, parameters in zip(groups, everything, strict=True):
            group["params"] = parameters


def view_of(optimizer: Optimizer, tensors: Iterable[Tensor]) -> Optimizer:
    """The optimizer over some of its parameters, with the same settings and states: two threads may step two views."""
    wanted = set(map(id, tensors))
    view = object.__new__(type(optimizer))
    vars(view).update(vars(optimizer))
    if vars(view).pop("step", None) is not None:  # a schedule of torch has wrapped it, to see that it is called
        vars(optimizer)["_opt_called"] = True
    view.param_groups = [
        {**group, "params": [each for each in group["params"] if id(each) in wanted]}
        for group in optimizer.param_groups
    ]
    return view


def stand_ins(optimizer: Optimizer, states: Mapping[Tensor, tuple[Tensor, dict[str, Any]]]) -> Optimizer:
    """The optimizer over other tensors, each with its state, in place of some of its own, with the same settings."""
    view = view_of(optimizer, states)
    for group in view.param_groups:
        group["params"] = [states[each][0] for each in group["params"]]
    view.state = defaultdict(dict, dict(states.values()))
    return view


@contextmanager
def decided(optimizer: Optimizer, factor: Tensor | None, is_off: Tensor) -> Iterator[None]:
    """Let the step multiply gradients with a factor that need not be known yet, or do nothing where `is_off`.

    The kernel writes the products back, so no factor is faster than one.
    """
    given = {"found_inf": is_off.float()}
    if factor is not None:
        given["grad_scale"] = (1 / factor).float()
    vars(optimizer).update(given)
    try:
        yield
    finally:
        for name in given:
            del vars(optimizer)[name]


def _has_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody wants to be told of each step, beside our own guard."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    others = [hook for hook in _global_optimizer_pre_hooks.values() if not isinstance(hook, Guard)]
    return bool(own or others or _global_optimizer_post_hooks)


def _has_kernel(optimizer: Optimizer, kinds: tuple[type[Optimizer], ...]) -> bool:
    return _steps_like(optimizer, kinds) and all(group.get("fused") for group in optimizer.param_groups)


def _steps_like(optimizer: Optimizer, kinds: tuple[type[Optimizer], ...]) -> bool:
    # torch wraps `step` in the class itself when the first instance is made, so only what is inside can be compared.
    return inspect.unwrap(type(optimizer).step) in {inspect.unwrap(kind.step) for kind in kinds}


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether an optimizer has states that a step has made, as opposed to its constructor."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state)


def renew_states(optimizer: Optimizer) -> None:
    """Make anew, for the parameters that the groups have now, what a constructor made: Adagrad's makes states."""
    optimizer.state.clear()
    if isinstance(optimizer, Adagrad):
        start = optimizer.defaults["initial_accumulator_value"]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = _adagrad_state(parameter, start, fused=bool(group["fused"]))


def _adagrad_state(parameter: Tensor, start: float, *, fused: bool) -> dict[str, Any]:
    place = parameter.device if fused else torch.device("cpu")
    return {"step": torch.zeros((), dtype=torch.float32, device=place), "sum": torch.full_like(parameter, start)}
