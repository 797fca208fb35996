"""Errors about arguments in the configuration that the class they are for does not take."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from mizzen.config.optimizer import unknown
from mizzen.config.section import flag, real, shown
from mizzen.errors import ConfigError


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
