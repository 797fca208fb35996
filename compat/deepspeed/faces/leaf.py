"""Modules that ZeRO-3 gathers as one unit. They are mizzen's, and have the attribute `_z3_leaf` that scripts read."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from deepspeed.faces.errors import also
from mizzen.errors import UsageError
from mizzen.parallel.zero.full.init import find, is_in_pinned, is_pinned, pin


@also(AssertionError)
def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """All modules of these classes, the model itself included; an error where there is none."""
    return _flagged(model, leaf_module_classes, True, raise_if_not_found)


@also(AssertionError)
def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take it back for all modules of these classes."""
    return _flagged(model, leaf_module_classes, False, raise_if_not_found)


@also(AssertionError)
def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """(the modules of these full names, the names that no module has)."""
    return _found(model, module_names, "name", flag, raise_if_not_found)


@also(AssertionError)
def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """(the modules whose names end so, the ends that no name has)."""
    return _found(model, module_name_suffixes, "suffix", flag, raise_if_not_found)


@also(AssertionError)
def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """One module."""
    pin(model, flag)
    model._z3_leaf = flag  # type: ignore[assignment]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether it is one."""
    return bool(vars(model).get("_z3_leaf", is_pinned(model)))


def z3_leaf_parameter(model: Tensor) -> bool:
    """Whether a parameter is of such a module."""
    return is_in_pinned(model)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All of them in a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def apply_zero_leaf_module_config(model: nn.Module, leaf_cfg: Any) -> list[nn.Module]:
    """Those that a section `leaf_module` names; what it names and the model does not have is passed over."""
    if leaf_cfg is None:
        return []
    found = set_z3_leaf_modules(model, list(leaf_cfg.classes), raise_if_not_found=False)
    found += set_z3_leaf_modules_by_name(model, list(leaf_cfg.names), raise_if_not_found=False)[0]
    found += set_z3_leaf_modules_by_suffix(model, list(leaf_cfg.name_suffixes), raise_if_not_found=False)[0]
    return list(dict.fromkeys(found))


def read_flags(model: Any) -> None:
    """Pin the modules whose `_z3_leaf` a script has set itself, and no longer those that it has unset."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if "_z3_leaf" in vars(module) and vars(module)["_z3_leaf"] != is_pinned(module):
            pin(module, bool(vars(module)["_z3_leaf"]))


def _flagged(model: nn.Module, classes: Sequence[type | str], flag: bool, must_be_there: bool) -> list[nn.Module]:
    found = find(model, classes, must_be_there=False)
    if not found and must_be_there:
        named = ", ".join(each.__name__ if isinstance(each, type) else repr(each) for each in classes)
        raise UsageError(f"no module of {type(model).__name__} is of the classes {named or '(none were given)'}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _found(
    model: nn.Module, wanted: Sequence[str], how: str, flag: bool, must_be_there: bool
) -> tuple[list[nn.Module], list[str]]:
    matches = {each: find(model, [each], how=how, must_be_there=False) for each in wanted}
    missing = [each for each, modules in matches.items() if not modules]
    if missing and must_be_there:
        raise UsageError(f"no module of {type(model).__name__} has the {how} {', '.join(map(repr, missing))}")
    found = list(dict.fromkeys(module for modules in matches.values() for module in modules))
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing
