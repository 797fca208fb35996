"""What happens to a raw dict before the strict parse: every key gets its one name and place, "auto" means derive it.

All of it works in place on plain dicts, by the schema's own declarations. The only keys that are named here are those
for which "auto" has no answer, and those at the top of published files that DeepSpeed passes over in silence: here they
are errors that say so. The drop-in passes over those that ask for nothing, with a warning.
"""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from mizzen.config.section import Fate, Nest, OpenSection, Section, fate_of, keys_of, nest_in, schema_keys, shown
from mizzen.errors import ConfigError
from mizzen.log import warn_once
from mizzen.wording import and_more

_HARMLESS: Final = {
    "comms_config": "what is read is comms_logger",
    "monitor_config": "what is read is tensorboard, wandb, csv_monitor and comet, at the top of the file",
}
_ASKING: Final = {
    "fp8": "the model would not compute in fp8; use bf16",
    "sequence_parallel": "no sequence would be shared; the key for it is sequence_parallel_size",
}
"""Keys whose silence would be a wrong result: whoever wrote them believes to get what he does not."""
_SILENT: Final = "unknown key, which DeepSpeed passes over in silence"
AUTO: Final = "auto"
Problem = tuple[str, str]
"""A path and what is wrong there."""


def is_harmless(key: str) -> bool:
    """Whether a key at the top asks for nothing: a comment, or a section that was never read."""
    return key.startswith("_") or key in _HARMLESS


def why_ignored(key: str) -> str | None:
    """What to say of a key that DeepSpeed passes over; None of all others, such as slips of the keyboard."""
    if key in _ASKING:
        return f"{_SILENT}: {_ASKING[key]}"
    if not is_harmless(key):
        return None
    meant = _HARMLESS.get(key, "comments are written as in HJSON, with #")
    return f"{_SILENT}: {meant}. Leave it out; the drop-in (--drop-in) only warns of it"


@dataclass(frozen=True, slots=True)
class GivenKey:
    """One key present in a raw dict, with the dict that holds it."""

    path: str
    name: str
    field: FieldInfo
    holder: dict[str, Any]

    @property
    def value(self) -> Any:
        """What the user gave."""
        return self.holder.get(self.name)

    @property
    def fate(self) -> Fate:
        """What the key declares."""
        return fate_of(self.field)

    @property
    def nest(self) -> Nest | None:
        """The sections that the key holds."""
        return nest_in(self.field.annotation)


def walk(raw: dict[str, Any], section: type[Section], path: str = "") -> Iterator[GivenKey]:
    """Every known key given in `raw`, parents before children."""
    for name, field in section.model_fields.items():
        if name not in raw:
            continue
        found = GivenKey(f"{path}{name}", name, field, raw)
        yield found
        if found.nest is not None:
            for below, inner in found.nest.objects(raw.get(name)):
                yield from walk(inner, found.nest.section, f"{found.path}{below}.")


def spread_paths(raw: dict[str, Any]) -> None:
    """Put a top-level key with dots where it points to. Clients write such keys as hints: a value there wins."""
    for path in [key for key in raw if "." in key and all(key.split("."))]:
        value = raw.pop(path)
        *parents, last = path.split(".")
        holder = raw
        for parent in parents:
            holder = holder.setdefault(parent, {})
            if not isinstance(holder, dict):
                raise ConfigError(path, f"a path to a key, but {parent} is not an object of keys")
        if is_auto(holder.setdefault(last, value)):
            holder[last] = value
        elif holder[last] != value:
            warn_once(f'"{path}" at the top level gives way to the value inside {".".join(parents)}')


def drop_ignored(raw: dict[str, Any], root: type[Section]) -> list[str]:
    """Remove the keys at the top that DeepSpeed passes over and that ask for nothing; returns them."""
    ignored = [key for key in raw if is_harmless(key) or ("." in key and not _points_somewhere(key, root))]
    for key in ignored:
        del raw[key]
    return ignored


def _points_somewhere(key: str, root: type[Section]) -> bool:
    alone: dict[str, Any] = {key: None}
    spread_paths(alone)
    return not name_keys(alone, root)


def name_keys(
    raw: dict[str, Any], section: type[Section], path: str = "", root: type[Section] | None = None
) -> list[Problem]:
    """Give every key its first spelling and every section its object form; returns a problem for each unknown key."""
    root = root or section
    problems: list[Problem] = []
    spellings = keys_of(section)
    for key in list(raw):
        here = f"{path}{_legible(key)}"
        if key not in spellings:
            if not issubclass(section, OpenSection):
                ignored = None if path else why_ignored(key)
                problems.append((here, ignored or _unknown(key, spellings, root)))
            continue
        name, field = spellings[key]
        if name != key:
            if name in raw:
                raise ConfigError(here, f"given together with {path}{name}, its other spelling: keep one of the two")
            raw[name] = raw.pop(key)
        nest = nest_in(field.annotation)
        if nest is not None:
            raw[name] = _in_object_form(raw[name], nest.section, here)
            for below, inner in nest.objects(raw[name]):
                problems += name_keys(inner, nest.section, f"{here}{below}.", root)
    return problems


def _legible(key: str) -> str:
    """A key as part of a path; an empty or endless one is quoted, so that the path can still be read."""
    return key if key.strip() and len(key) <= 60 else shown(key)


def _in_object_form(value: Any, section: type[Section], path: str) -> Any:
    keys = section.from_old_form(value)
    if keys is None:
        return value
    warn_once(f"{path} given as a plain value is an old form; use {path}: {keys} instead", key=f"old {path}")
    return keys


def _unknown(key: str, known: Iterable[str], root: type[Section]) -> str:
    """The message for a key that does not exist here: a slip of the keyboard, a key of another section, or neither."""
    names = sorted(known)
    if near := difflib.get_close_matches(key, names, n=1, cutoff=0.8):
        return f"unknown key; did you mean '{near[0]}'?"
    if 1 <= len(elsewhere := [place.path for place in schema_keys(root) if place.name == key]) <= 3:
        return f"unknown key here; did you mean {' or '.join(elsewhere)}?"
    if near := difflib.get_close_matches(key, names, n=1, cutoff=0.6):
        return f"unknown key; did you mean '{near[0]}'?"
    return f"unknown key; known here: {and_more(names, 12)}"


def move_old_keys(raw: dict[str, Any], root: type[Section]) -> dict[str, str]:
    """Move every deprecated key to its new path; returns new path -> old path."""
    moved: dict[str, str] = {}
    for found in list(walk(raw, root)):
        if found.fate.kind != "moved":
            continue
        target = found.fate.moved_to
        note = f" ({found.fate.reason})" if found.fate.reason else ""
        use = f"; use {target} instead" if target else " without effect"
        warn_once(f"{found.path} is an old key{use}{note}", key=f"old {found.path}")
        value = found.holder.pop(found.name)
        if not target or value is None or is_auto(value):
            continue
        converted = _converted(value, found)
        if converted is not None:
            _set(raw, target, converted, found.path)
            moved[target] = found.path
    return moved


def _converted(value: Any, found: GivenKey) -> Any:
    try:
        return found.fate.convert(value) if found.fate.convert else value
    except ValueError as error:
        raise ConfigError(found.path, str(error)) from None


def _set(raw: dict[str, Any], path: str, value: Any, old: str) -> None:
    *parents, last = path.split(".")
    holder = raw
    for parent in parents:
        holder = holder.setdefault(parent, {})
        if not isinstance(holder, dict):
            raise ConfigError(old, f"moves to {path}, but {parent} is not an object of keys")
    if last in holder and not is_auto(holder[last]):
        raise ConfigError(path, f"given together with its old name {old}: keep only {path}")
    holder[last] = value


_ARGUMENTS_WITHOUT_DEFAULT: Final = ("cycle_min_lr", "cycle_max_lr", "total_iters", "T_max")
"""Arguments of schedules that only the user can know; `resolve.py` has those that clients fill in."""


def is_auto(value: Any) -> bool:
    """Whether a value is the word "auto"."""
    return isinstance(value, str) and value == AUTO


def drop_autos(raw: dict[str, Any], root: type[Section]) -> frozenset[str]:
    """Remove every key whose value is "auto", which leaves it to be derived or to take its default.

    Returns their paths. An "auto" that nobody could answer is an error that names it.
    """
    dropped: set[str] = set()
    for found in list(walk(raw, root)):
        if is_auto(found.value) and not _is_own_word(found.field.annotation):
            _drop(found.holder, found.name, found.path, needed=found.field.is_required())
            dropped.add(found.path)
        elif found.nest is None and isinstance(found.value, dict):
            for key in [key for key, value in found.value.items() if is_auto(value)]:
                _drop(found.value, key, f"{found.path}.{key}", needed=key in _ARGUMENTS_WITHOUT_DEFAULT)
                dropped.add(f"{found.path}.{key}")
    return frozenset(dropped)


def _drop(holder: dict[str, Any], key: str, path: str, *, needed: bool) -> None:
    if needed:
        raise ConfigError(path, '"auto" cannot be derived from the configuration: give a value')
    del holder[key]


def _is_own_word(annotation: Any) -> bool:
    """Some keys have "auto" among their own values: it then is a value like any other."""
    if get_origin(annotation) is Literal:
        return AUTO in get_args(annotation)
    return any(_is_own_word(part) for part in get_args(annotation))
