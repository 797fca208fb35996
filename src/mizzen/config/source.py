"""From whatever a user hands over (dict, path, JSON, HJSON, urlsafe base64) to a plain dict. It judges no key."""

import base64
import binascii
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mizzen.errors import ConfigError

Source = Mapping[str, Any] | str | os.PathLike[str]


def read_source(source: Source) -> dict[str, Any]:
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
        return _parse(text, "the given text")
    decoded = _from_base64(text)
    if decoded is not None and decoded.lstrip().startswith(("{", "#", "/")):  # "train" is base64, too, of nothing
        return _parse(decoded, "the base64 text")
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
    return _parse(text, str(path))


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


def _parse(text: str, origin: str) -> dict[str, Any]:
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
