"""From whatever a user hands over (dict, path, JSON, HJSON, urlsafe base64) to a frozen `Config`.

What is wrong is a `ConfigError` that starts with the path of a key; there is never another error.
"""

import base64
import binascii
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from mizzen.config.checks import check, is_changed, why_without_effect
from mizzen.config.migrate import Problem, drop_autos, move_old_keys, name_keys, spread_paths, walk
from mizzen.config.schema import AS_AUTO, Config, Origin
from mizzen.config.section import BelowError, shown
from mizzen.errors import ConfigError
from mizzen.log import warn_of

ConfigSource = Mapping[str, Any] | str | os.PathLike[str]


def read_source(source: ConfigSource) -> dict[str, Any]:
    """The configuration as a dict of its own: what the caller holds is never changed."""
    found: dict[str, Any] = _copied(source if isinstance(source, Mapping) else _read_text(source))
    return found


def _read_text(source: str | os.PathLike[str]) -> dict[str, Any]:
    if not isinstance(source, str | os.PathLike):
        raise ConfigError("", f"a configuration is a dict, a path, or text; this is a {type(source).__name__}")
    text = os.fspath(source)
    if isinstance(source, os.PathLike) or _is_file(text):
        return _read_file(Path(text))
    if text.lstrip().startswith("{"):
        return _parse_text(text, "the given text")
    decoded = _from_base64(text)
    if decoded is not None and decoded.lstrip().startswith(("{", "#", "/")):  # "train" is base64, too, of nothing
        return _parse_text(decoded, "the base64 text")
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    raise ConfigError("", f"{shown!r} is neither an existing file, nor JSON, nor urlsafe base64 of JSON")


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError("", f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError("", f"cannot read {path}: {error.strerror or error}") from None
    return _parse_text(text, str(path))


def _from_base64(text: str) -> str | None:
    try:
        return base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, UnicodeError, ValueError):
        return None


class _Twice(dict[str, Any]):
    """An object in which some keys were given more than once. Its path is known once all is read."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        keys = [key for key, _ in pairs]
        self.names = sorted({key for key in keys if keys.count(key) > 1})


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _Twice(pairs)


def _refuse_duplicates(value: Any, path: str = "") -> None:
    if isinstance(value, _Twice):
        names = ", ".join(value.names)
        raise ConfigError(
            f"{path}{value.names[0]}", f"given more than once in the same object (duplicate keys: {names})"
        )
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        _refuse_duplicates(each, f"{path}{key}.")


def _parse_text(text: str, origin: str) -> dict[str, Any]:
    """JSON where it is JSON, which is fast and strict; HJSON otherwise, which has comments and forgives commas."""
    if not text.strip():  # HJSON would make an object without keys of it
        raise ConfigError("", f"{origin} is empty")
    try:
        found = _parse_json_or_hjson(text, origin)
        _refuse_duplicates(found)
    except RecursionError:
        raise ConfigError("", f"{origin} is nested too deeply") from None
    except ConfigError:
        raise
    except ValueError as error:  # an integer of more than 4300 digits
        raise ConfigError("", f"{origin} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError("", f"{origin} holds a {type(found).__name__}, not an object of keys")
    return found


def _parse_json_or_hjson(text: str, origin: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        strict = error
    import hjson  # 20 ms that strict JSON does not pay

    try:
        return hjson.loads(text, object_pairs_hook=_object)
    except hjson.HjsonDecodeError:
        where = f"line {strict.lineno}, column {strict.colno}"
        raise ConfigError("", f"{origin} is neither JSON nor HJSON: {strict.msg} at {where}") from None


DEEPEST: Final = 100
"""Levels of objects and lists. No file has a tenth of them, and one that contains itself has no end."""


def _copied(value: Any, path: str = "", depth: int = 0) -> Any:
    """Objects and lists of any kind as new dicts and lists; anything else cannot be changed by us."""
    if depth > DEEPEST:
        raise ConfigError("", f"nested too deeply: more than {DEEPEST} levels, or an object that contains itself")
    if isinstance(value, Mapping):
        return {_str_key(key, path): _copied(inner, f"{path}{key}.", depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(inner, f"{path}{index}.", depth + 1) for index, inner in enumerate(value)]
    return value


def _str_key(key: Any, path: str) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"{path}{key!r}", f"keys are strings, not of type {type(key).__name__}")
    return key


def load(source: ConfigSource) -> Config:
    """Read, migrate, parse and check a configuration. What depends on the number of ranks is `resolve`'s business."""
    raw = read_source(source)
    spread_paths(raw)
    _raise_first(name_keys(raw, Config))
    moved = move_old_keys(raw, Config)
    autos = drop_autos(raw, Config)
    config = _validated(raw).with_origins(_origins(raw, moved, autos))
    _apply_fates(raw, config)
    check(config)
    return config


def load_section(source: ConfigSource, name: str) -> Config:
    """A configuration with one section of a source; what else is in it is for `initialize` to judge."""
    raw = read_source(source)
    spread_paths(raw)
    return load({name: raw[name]} if name in raw else {})


def _raise_first(problems: list[Problem]) -> None:
    """All problems in one error, because a user wants to correct a file once."""
    if problems:
        (path, message), *others = sorted(set(problems))
        raise ConfigError(path, message + "".join(f"\n  also {path}: {message}" for path, message in others))


def _validated(raw: dict[str, Any]) -> Config:
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
