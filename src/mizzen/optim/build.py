"""From a name and arguments in the configuration to a torch optimizer or a schedule."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Final
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, lr_scheduler

from mizzen.config.optimizer import LOW_BIT, NOT_FROM_JSON, check_optimizer, check_scheduler, rule_of
from mizzen.config.section import flag, shown
from mizzen.errors import ConfigError, MissingExtra
from mizzen.model.sketch import ParameterSketch
from mizzen.optim.lamb import Lamb
from mizzen.optim.muon import Muon, split_groups
from mizzen.optim.names import check_arguments, check_values
from mizzen.optim.rules import ELEMENTWISE
from mizzen.optim.schedules import SCHEDULES, LRSchedule

OPTIMIZERS: Final[Mapping[str, type[Optimizer]]] = {
    kind.__name__.lower(): kind for kind in (*ELEMENTWISE, Adafactor, Lamb, Muon)
}
_METHODS: Final = ("standard", "gram")
"""Names for Muon's iteration. Both mean the same polynomial, and here it is computed in one way."""
_LOW_BIT: Final = {name.lower(): name for name in LOW_BIT}

_FUSED: Final = {
    Adam: ("cpu", "cuda"),
    AdamW: ("cpu", "cuda"),
    SGD: ("cpu", "cuda"),
    Adagrad: ("cpu",),
}
"""Where a rule has a fused kernel on every torch that we support; Adagrad's on CUDA is missing in 2.11."""

_ADAM_ONLY: Final = {
    "bias_correction": "Adam without bias correction is not built yet",
    "fp32_optimizer_states": "states are kept in fp32",
}
"""Arguments of other implementations of Adam that may only be true here."""

_TORCH_SCHEDULES: Final[Mapping[str, type[Any]]] = {
    name.lower(): vars(lr_scheduler)[name]
    for name in lr_scheduler.__all__
    if name != "LRScheduler" and name.lower() not in NOT_FROM_JSON
}


def build_optimizer(
    name: str,
    arguments: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    *,
    device_type: str,
    facts: Mapping[int, ParameterSketch] | None = None,
) -> Optimizer:
    """The optimizer called `name` in any case, over parameter groups; fused where the device has a kernel for it.

    Names of other implementations of a rule, such as FusedAdam or DeepSpeedCPUAdam, mean the rule. `facts` has what is
    known of the parameters by their ids, for a rule that treats some of them in another way.
    """
    check_optimizer(name)
    kind = OPTIMIZERS.get(rule_of(name)) or _of_torchao(rule_of(name))
    given = dict(arguments)
    if kind is Muon:
        groups = split_groups(groups, facts or {})
        _check_method(given.pop("ns_method", _METHODS[0]))
    if kind in (Adam, AdamW):
        kind = _adam(kind, given)
    check_arguments("optimizer", kind, given)
    for key, value in given.items():
        if isinstance(value, str):
            raise ConfigError(f"optimizer.params.{key}", f"{shown(value)} is not a number")
    check_values("optimizer", kind, given)
    if device_type in _FUSED.get(kind, ()) and not given.keys() & {"fused", "foreach", "differentiable"}:
        given["fused"] = all(p.is_floating_point() and not p.is_meta for group in groups for p in group["params"])
    try:
        return kind([dict(group) for group in groups], **given)
    except (ValueError, TypeError, RuntimeError, LookupError) as error:
        raise ConfigError("optimizer.params", f"{kind.__name__} cannot be built: {error}") from error


def _of_torchao(rule: str) -> type[Optimizer]:
    try:
        found = importlib.import_module("torchao.optim")
    except ImportError as error:
        raise MissingExtra("torchao", extra="lowbit", purpose=f"optimizer.type {_LOW_BIT[rule]}") from error
    kind: type[Optimizer] = vars(found)[_LOW_BIT[rule]]
    return kind


def _adam(kind: type[Optimizer], given: dict[str, Any]) -> type[Optimizer]:
    """Which Adam is meant, by arguments that torch does not have; they are taken out.

    Weight decay is decoupled also under the name Adam, unless `adam_w_mode` says otherwise. It is 0 when absent, as in
    every implementation that these names stand for but torch's, which `torch_adam` asks for.
    """
    for key, why in _ADAM_ONLY.items():
        if not _taken(given, key, True):
            raise ConfigError(f"optimizer.params.{key}", f"false is refused: {why}")
    _taken(given, "set_grad_none", True)
    if not _taken(given, "torch_adam", False):
        given.setdefault("weight_decay", 0.0)
    spelling = "adamw_mode" if "adamw_mode" in given else "adam_w_mode"
    is_decoupled = _taken(given, spelling, True)
    if kind is AdamW and not is_decoupled:
        raise ConfigError(f"optimizer.params.{spelling}", "AdamW is the decoupled one: use type Adam for false")
    return AdamW if is_decoupled else Adam


def _check_method(name: Any) -> None:
    if name not in _METHODS:
        raise ConfigError("optimizer.params.ns_method", f"{shown(name)} is none of {', '.join(_METHODS)}")


def _taken(given: dict[str, Any], key: str, default: bool) -> bool:
    try:
        return flag(given.pop(key, default))
    except ValueError as error:
        raise ConfigError(f"optimizer.params.{key}", str(error)) from None


def build_scheduler(
    name: str, arguments: Mapping[str, Any], optimizer: Optimizer
) -> LRSchedule | lr_scheduler.LRScheduler:
    """The schedule called `name` in any case, ours or a class of torch.optim.lr_scheduler."""
    known = {**_TORCH_SCHEDULES, **{kind.__name__.lower(): kind for kind in SCHEDULES}}
    if name.lower() not in known:
        check_scheduler(name)
    kind: type[Any] = known[name.lower()]
    check_arguments("scheduler", kind, arguments)
    if kind not in SCHEDULES:
        check_values("scheduler", kind, arguments)
    _rehearse(kind, arguments, optimizer)
    made: LRSchedule | lr_scheduler.LRScheduler = kind(optimizer, **arguments)
    return made


def _rehearse(kind: type[Any], arguments: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Let a schedule make its first step on groups like these: most of torch's find out what is wrong only there."""
    groups = [
        {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
        | {"params": [torch.zeros(1)]}
        for group in optimizer.param_groups
    ]
    stand_in = Optimizer(groups, dict(optimizer.defaults))
    needs_more = kind is lr_scheduler.ReduceLROnPlateau
    try:
        schedule = kind(stand_in, **arguments)
        with catch_warnings():
            simplefilter("ignore")  # nothing is trained here, so the optimizer need not have stepped before
            schedule.step(**({"metrics": 0.0} if needs_more else {}))
    except ConfigError:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise ConfigError("scheduler.params", f"{kind.__name__} cannot be built: {error}") from error
