"""From a source to a frozen `Config`, or to a `ConfigError` that starts with the path of the key. Never another error."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from mizzen.config.checks import check
from mizzen.config.migrate import drop_autos, move_old_keys, walk
from mizzen.config.origin import Origin
from mizzen.config.schema import Config
from mizzen.config.section import OpenSection, Section, keys_of, section_in
from mizzen.config.source import Source, read_source, str_key
from mizzen.errors import ConfigError
from mizzen.log import info_once


def load(source: Source) -> Config:
    """Read, migrate, parse and check a configuration. What depends on the number of ranks is `resolve`'s business."""
    raw = read_source(source)
    _check_keys(raw, Config)
    moved = move_old_keys(raw, Config)
    autos = drop_autos(raw, Config)
    _check_exclusive(raw, Config)
    config = _parse(raw)
    _apply_fates(raw, config)
    check(config)
    return config.with_origins(_origins(raw, moved, autos))


def _check_keys(raw: Mapping[Any, Any], section: type[Section], path: str = "") -> None:
    spellings = keys_of(section)
    for key, value in raw.items():
        here = f"{path}{str_key(key)}"
        if key not in spellings:
            if not issubclass(section, OpenSection):
                raise ConfigError(here, _unknown(key, list(spellings)))
            continue
        inner = section_in(spellings[key][1].annotation)
        if inner is not None and isinstance(value, dict):
            _check_keys(value, inner, f"{here}.")


def _unknown(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean '{near[0]}'?"
    return f"unknown key; known here: {', '.join(sorted(known)[:12])}{', ...' if len(known) > 12 else ''}"


def _check_exclusive(raw: dict[str, Any], section: type[Section], path: str = "") -> None:
    for one, other in section.exclusive:
        if raw.get(one) is not None and raw.get(other) is not None:
            raise ConfigError(f"{path}{one}", f"given together with {path}{other}: keep one of the two")
    names = [spelling for spelling in raw if spelling in keys_of(section)]
    for spelling in names:
        name, field = keys_of(section)[spelling]
        if field.alias in raw and name in raw and field.alias != name:
            raise ConfigError(f"{path}{field.alias}", f"given together with {path}{name}, its other name: keep one")
        inner = section_in(field.annotation)
        if inner is not None and isinstance(raw[spelling], dict):
            _check_exclusive(raw[spelling], inner, f"{path}{spelling}.")


def _parse(raw: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        problems = [_translate(problem) for problem in error.errors(include_url=False)]
    except RecursionError:
        raise ConfigError("", "the configuration is nested too deeply") from None
    first, *others = sorted(set(problems))
    more = "".join(f"\n  also {path}: {message}" for path, message in others)
    raise ConfigError(first[0], first[1] + more)


def _translate(problem: Any) -> tuple[str, str]:
    """pydantic's report as (path, message) in our words."""
    path = ".".join(str(part) for part in problem["loc"] if not _is_type_name(part))
    kind, value, context = problem["type"], problem.get("input"), problem.get("ctx", {})
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    match kind:
        case "value_error":
            message = str(context.get("error", problem["msg"]))
        case "missing":
            message = "required here, but absent"
        case "literal_error" | "enum":
            message = f"{shown} is not one of [{context.get('expected', '').replace(' or ', ', ')}]"
        case "greater_than_equal":
            message = f"{shown} is below the least allowed value, {context['ge']}"
        case "greater_than":
            message = f"{shown} must be greater than {context['gt']}"
        case "less_than_equal":
            message = f"{shown} is above the largest allowed value, {context['le']}"
        case "less_than":
            message = f"{shown} must be less than {context['lt']}"
        case "model_type" | "model_attributes_type" | "dict_type":
            message = f"{shown} is not an object of keys"
        case _:
            message = f"{shown}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"
    return path, message


def _is_type_name(part: Any) -> bool:
    """Unions put the name of the tried type into pydantic's path; no key of ours has a bracket or a capital."""
    return isinstance(part, str) and ("[" in part or part[:1].isupper() or part in {"int", "float", "str", "bool"})


def _apply_fates(raw: dict[str, Any], config: Config) -> None:
    for found in walk(raw, Config):
        if found.fate.kind == "read":
            continue
        default = found.section.model_fields[found.name].get_default(call_default_factory=True)
        value = config.at(found.path)
        if value == default or value is None:
            continue
        if found.fate.kind == "refused":
            raise ConfigError(found.path, f"refused: {found.fate.reason}")
        info_once(f"{found.path} has no effect here: {found.fate.reason}")


def _origins(raw: dict[str, Any], moved: Mapping[str, str], autos: frozenset[str]) -> dict[str, Origin]:
    origins = {path: Origin("given") for path in _leaves(raw)}
    origins |= {path: Origin("default", 'asked for as "auto"') for path in autos}
    for new, old in moved.items():
        for path in [path for path in origins if path == new or path.startswith(f"{new}.")]:
            origins[path] = Origin("given", f"as {old}")
    return origins


def _leaves(raw: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in raw.items():
        yield f"{path}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
