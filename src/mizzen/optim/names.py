"""Errors about a name or an argument that the configuration gives and that does not exist."""

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from mizzen.errors import ConfigError


def unknown(path: str, what: str, given: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not known, with the nearest one or all that are."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(given.lower(), names, n=1)
    way_out = f"did you mean '{names[near[0]]}'?" if near else f"known: {', '.join(sorted(names.values()))}"
    return ConfigError(path, f"{what}; {way_out}")


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
