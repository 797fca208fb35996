"""What happens to a raw dict before the strict parse: old keys move to their new path, "auto" means derive it.

Both work on plain dicts and on the schema's own declarations; no key is named here except where "auto" has no answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from mizzen.config.section import Fate, OpenSection, Section, fate_of, keys_of, section_in
from mizzen.errors import ConfigError
from mizzen.log import warn_once

AUTO: Final = "auto"
_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Found:
    """One key present in a raw dict, with the section class and the dict that hold it."""

    path: str
    key: str
    name: str
    fate: Fate
    section: type[Section]
    holder: dict[str, Any]


def walk(raw: dict[str, Any], section: type[Section], path: str = "") -> Iterator[Found]:
    """Every known key given in `raw`, parents before children."""
    spellings = keys_of(section)
    for key in list(raw):
        if key not in spellings:
            continue
        name, field = spellings[key]
        here = f"{path}{key}"
        yield Found(here, key, name, fate_of(field), section, raw)
        inner = section_in(field.annotation)
        if inner is not None and isinstance(raw.get(key), dict):
            yield from walk(raw[key], inner, f"{here}.")


def move_old_keys(raw: dict[str, Any], root: type[Section]) -> dict[str, str]:
    """Move every deprecated key of `raw` in place; returns new path -> old path."""
    moved: dict[str, str] = {}
    for found in list(walk(raw, root)):
        if found.fate.kind != "moved" or found.key not in found.holder:
            continue
        value = found.holder.pop(found.key)
        target = found.fate.moved_to
        note = f" ({found.fate.reason})" if found.fate.reason else ""
        if not target:
            warn_once(f"{found.path} is an old key without effect{note}", key=f"old {found.path}")
            continue
        warn_once(f"{found.path} is an old key; use {target} instead{note}", key=f"old {found.path}")
        converted = found.fate.convert(value) if found.fate.convert else value
        if converted is not None and value != AUTO:
            _set(raw, target, converted, found.path)
            moved[target] = found.path
    return moved


def _set(raw: dict[str, Any], path: str, value: Any, old: str) -> None:
    *parents, last = path.split(".")
    holder = raw
    for parent in parents:
        holder = holder.setdefault(parent, {})
        if not isinstance(holder, dict):
            raise ConfigError(old, f"moves to {path}, but {parent} is not an object")
    if holder.get(last, _MISSING) is not _MISSING:
        raise ConfigError(path, f"given together with its old name {old}: keep only {path}")
    holder[last] = value


_ARGUMENTS_WITHOUT_DEFAULT: Final = ("total_num_steps", "cycle_min_lr", "cycle_max_lr", "total_iters", "T_max")
"""Arguments of schedules that only the caller can know."""


def drop_autos(raw: dict[str, Any], root: type[Section]) -> frozenset[str]:
    """Remove in place every key whose value is "auto", which leaves it to be derived or to take its default.

    Returns their paths. An "auto" that nobody could answer is an error that names it.
    """
    dropped: set[str] = set()
    for found in list(walk(raw, root)):
        if found.key not in found.holder:
            continue
        value = found.holder[found.key]
        if value == AUTO and not _is_own_word(found):
            del found.holder[found.key]
            dropped.add(found.path)
        elif isinstance(value, dict) and section_in(found.section.model_fields[found.name].annotation) is None:
            dropped |= _drop_arguments(value, found.path)
        elif isinstance(value, dict) and _is_open(found):
            dropped |= _drop_arguments(value, found.path)
    return frozenset(dropped)


def _is_open(found: Found) -> bool:
    inner = section_in(found.section.model_fields[found.name].annotation)
    return inner is not None and issubclass(inner, OpenSection)


def _is_own_word(found: Found) -> bool:
    """Some keys have "auto" among their own values: it then is a value like any other."""
    return '"auto"' in str(found.section.model_fields[found.name].annotation).replace("'", '"')


def _drop_arguments(arguments: dict[str, Any], path: str) -> set[str]:
    dropped = {key for key, value in arguments.items() if value == AUTO}
    for key in sorted(dropped):
        if key in _ARGUMENTS_WITHOUT_DEFAULT:
            raise ConfigError(f"{path}.{key}", '"auto" cannot be derived from the configuration: give a number')
        del arguments[key]
    return {f"{path}.{key}" for key in dropped}
