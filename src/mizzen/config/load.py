"""From a source to a frozen `Config`, or to a `ConfigError` that starts with the path of a key; never another error."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import ValidationError

from mizzen.config.checks import check, is_changed, why_without_effect
from mizzen.config.migrate import Problem, drop_autos, move_old_keys, name_keys, spread_paths, walk
from mizzen.config.schema import AS_AUTO, Config, Origin
from mizzen.config.section import BelowError, shown
from mizzen.config.source import Source, read_source
from mizzen.errors import ConfigError
from mizzen.log import warn_of


def load(source: Source) -> Config:
    """Read, migrate, parse and check a configuration. What depends on the number of ranks is `resolve`'s business."""
    raw = read_source(source)
    spread_paths(raw)
    _raise_first(name_keys(raw, Config))
    moved = move_old_keys(raw, Config)
    autos = drop_autos(raw, Config)
    config = _parse(raw).with_origins(_origins(raw, moved, autos))
    _apply_fates(raw, config)
    check(config)
    return config


def load_section(source: Source, name: str) -> Config:
    """A configuration with one section of a source; what else is in it is for `initialize` to judge."""
    raw = read_source(source)
    spread_paths(raw)
    return load({name: raw[name]} if name in raw else {})


def _raise_first(problems: list[Problem]) -> None:
    """All problems in one error, because a user wants to correct a file once."""
    if problems:
        (path, message), *others = sorted(set(problems))
        raise ConfigError(path, message + "".join(f"\n  also {path}: {message}" for path, message in others))


def _parse(raw: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        _raise_first([_translate(problem) for problem in error.errors(include_url=False)])
        raise


_MESSAGES: Final = {
    "missing": "required here, but absent",
    "literal_error": "{shown} is not one of [{expected}]",
    "greater_than_equal": "{shown} is below the least allowed value, {ge:g}",
    "greater_than": "{shown} must be above {gt:g}",
    "less_than_equal": "{shown} is above the largest allowed value, {le:g}",
    "model_type": "{shown} is not an object of keys",
    "dict_type": "{shown} is not an object of keys",
    "tuple_type": "{shown} is not a list",
}
"""pydantic's reports in our words."""


def _translate(problem: Any) -> Problem:
    path = ".".join(str(part) for part in problem["loc"])
    kind, value, context = problem["type"], problem.get("input"), dict(problem.get("ctx", {}))
    if kind == "value_error":
        error = context["error"]
        return path + (error.below if isinstance(error, BelowError) else ""), str(error)
    if kind == "model_type" and value is None:
        return path, "null is not an object of keys; leave the key out"
    if kind not in _MESSAGES:
        return path, f"{shown(value)}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"
    context["expected"] = str(context.get("expected", "")).replace(" or ", ", ").replace("'", '"')
    return path, _MESSAGES[kind].format_map({**context, "shown": shown(value)})


def _apply_fates(raw: dict[str, Any], config: Config) -> None:
    inert = []
    for found in walk(raw, Config):
        if found.fate.kind == "refused" and is_changed(found, config):
            raise ConfigError(found.path, f"refused: {found.fate.reason}")
        if reason := why_without_effect(found, config):
            inert.append(f"{found.path} has no effect here: {reason}")
    warn_of(inert)


def _origins(raw: dict[str, Any], moved: Mapping[str, str], autos: frozenset[str]) -> dict[str, Origin]:
    origins = {path: Origin("given") for path in _paths(raw)}
    origins |= {path: Origin("default", AS_AUTO) for path in autos}
    for new, old in moved.items():
        origins |= {path: Origin("given", f"as {old}") for path in origins if f"{path}.".startswith(f"{new}.")}
    return origins


def _paths(raw: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in raw.items():
        yield f"{path}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{path}{key}.")
