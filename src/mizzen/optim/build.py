"""From what a configuration and a user give to an optimizer or a schedule: parameter groups, a name, and its arguments.

In the groups every parameter has a name and one place; an argument that the class does not take is an error.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, lr_scheduler

from mizzen.config.optimizer import LOW_BIT, NOT_FROM_JSON, check_optimizer, check_scheduler, rule_of, unknown
from mizzen.config.section import flag, real, shown
from mizzen.errors import ConfigError, MissingExtra, UsageError
from mizzen.log import warn_once
from mizzen.model.sketch import ParameterSketch
from mizzen.optim.own_rules import Lamb, Muon, split_groups
from mizzen.optim.rules import ELEMENTWISE
from mizzen.optim.schedules import SCHEDULES, LRSchedule
from mizzen.wording import and_more

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
        # A parameter on the meta device is stepped by masters that have values; Adagrad makes its states here and now.
        needs_values = kind is Adagrad
        given["fused"] = all(
            p.is_floating_point() and not (needs_values and p.is_meta) for group in groups for p in group["params"]
        )
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


def check_arguments(section: str, kind: type, given: Mapping[str, Any]) -> None:
    """Refuse an argument that a class does not take, and a missing one that it needs; the first is ours to give."""
    _, *taken = inspect.signature(kind).parameters.values()
    known = {parameter.name: parameter for parameter in taken}
    for name in given:
        if name not in known:
            raise unknown(f"{section}.params.{name}", f"unknown argument of {kind.__name__}", name, known)
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in given:
            raise ConfigError(f"{section}.params.{name}", f"{kind.__name__} needs it")


def check_values(section: str, kind: type, given: Mapping[str, Any]) -> None:
    """Compare arguments with a class's defaults: a flag is no number, and a pair has two of them."""
    parameters = inspect.signature(kind).parameters
    for name, value in given.items():
        path, default = f"{section}.params.{name}", parameters[name].default
        if isinstance(default, tuple):
            _check_row(path, value, len(default))
        elif isinstance(default, bool):
            _check(flag, path, value)
        elif isinstance(default, int | float):
            _check_number(path, value)


def _check_row(path: str, value: Any, length: int) -> None:
    if not isinstance(value, list | tuple) or len(value) != length:
        raise ConfigError(path, f"{shown(value)} is not a list of {length} numbers")
    for number, each in enumerate(value):
        if each is not None:
            _check_number(f"{path}.{number}", each)


def _check_number(path: str, value: Any) -> None:
    if not isinstance(value, Tensor):  # some rules take a tensor for a number
        _check(real, path, value)


def _check(read: Callable[[Any], Any], path: str, value: Any) -> None:
    try:
        read(value)
    except ValueError as error:
        raise ConfigError(path, str(error)) from None


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
    hint = f"; of that shape the model has {and_more(alike, 3)}" if alike else ""
    return UsageError(
        f"model_parameters: entry {place} of group {number}, of shape {shape}, is no parameter of the model{hint}. "
        "Take the parameters from the model after its last change"
    )
