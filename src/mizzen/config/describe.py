"""The words of the schema: what each key means, as a page, as a JSON schema for editors, or one key at a time.

The sentences are the strings under the fields. They are read from the source when somebody asks, never at import.
`examine` says of one configuration everything that is wrong with it, and what in it changes nothing; `load` stops at
the first kind of problem.
"""

import ast
import difflib
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from mizzen.config.checks import why_without_effect
from mizzen.config.load import ConfigSource, load, read_source
from mizzen.config.migrate import AUTO, Problem, drop_ignored, name_keys, spread_paths, walk
from mizzen.config.optimizer import check_optimizer, check_scheduler
from mizzen.config.schema import Config
from mizzen.config.section import Fate, Nest, SchemaKey, Section, Words, fate_of, keys_of, nest_in, schema_keys
from mizzen.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Explanation:
    """One key in words."""

    path: str
    type: str
    default: str
    """As JSON; empty for a section and for a key that must be given."""
    fate: Fate
    sentence: str
    allowed: tuple[str, ...] = ()
    """The values of a key that has a fixed set of them, as JSON."""
    keys: tuple[str, ...] = ()
    """The keys of a section."""

    def __str__(self) -> str:
        lines = [self.path, f"  {self.sentence}", f"  type:    {self.type}"]
        lines += [f"  default: {self.default}"] if self.default else []
        lines += [f"  fate:    {fate_words(self.fate)}"]
        lines += [f"  also:    {', '.join(self.fate.spellings)}"] if self.fate.spellings else []
        lines += [f"  keys:    {', '.join(self.keys)}"] if self.keys else []
        return "\n".join(lines)


def catalogue() -> Iterator[Explanation]:
    """Every key of the configuration, parents first."""
    return (_explained(place) for place in schema_keys(Config))


def explain(path: str) -> Explanation:
    """What a key means, in any accepted spelling; an unknown path is an error that names the nearest known ones."""
    schema_path = _schema_path(path.split("."), Config)
    known = {place.path: place for place in schema_keys(Config)}
    if schema_path in known:
        return _explained(known[schema_path])
    parent = schema_path.rpartition(".")[0]
    if parent in known and known[parent].field.annotation == Mapping[str, Any]:
        raise ConfigError(path, f"the keys of {parent} are your own")
    inside = [candidate for candidate in known if candidate.endswith(f".{path}")]
    near = inside or difflib.get_close_matches(path, known, n=3, cutoff=0.5)
    raise ConfigError(path, f"unknown key; did you mean {' or '.join(near[:3])}?" if near else "unknown key")


def _schema_path(parts: list[str], section: type[Section]) -> str:
    """A user's path as the schema writes it: first spellings, and `<name>` for a name of the user's own."""
    name, field = keys_of(section).get(parts[0], (parts[0], None))
    nest = nest_in(field.annotation) if field else None
    if nest is None or len(parts) == 1:
        return ".".join([name, *parts[1:]])
    if nest.kind == "one":
        return f"{name}.{_schema_path(parts[1:], nest.section)}"
    own = "<name>" if nest.kind == "table" else "<index>"
    return f"{name}.{own}.{_schema_path(parts[2:], nest.section)}" if parts[2:] else f"{name}.{own}"


def _explained(place: SchemaKey) -> Explanation:
    nest = nest_in(place.field.annotation)
    return Explanation(
        path=place.path,
        type=_type_words(place.field.annotation, tuple(place.field.metadata)),
        default=_default_words(place),
        fate=place.fate,
        sentence=_sentence(place.owner, place.name),
        allowed=tuple(json.dumps(value) for value in _literals(place.field.annotation)),
        keys=tuple(nest.section.model_fields) if nest else (),
    )


def _default_words(place: SchemaKey) -> str:
    default = place.field.get_default(call_default_factory=True)
    if place.field.is_required() or isinstance(default, Section) or place.fate.kind == "moved":
        return ""
    return json.dumps(default)


def _type_words(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    if words := [item.text for item in metadata if isinstance(item, Words)]:
        return words[-1]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_words(arguments[0], arguments[1:])
    if origin is Literal:
        return f"one of {', '.join(json.dumps(value) for value in arguments)}"
    if origin in (Union, UnionType):
        return " or ".join("null" if part is NoneType else _type_words(part) for part in arguments)
    if origin is tuple:
        return f"list ({_type_words(arguments[0])})"
    if origin is Mapping:
        return "sections by name"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    raise AssertionError(f"a type without words: {annotation!r}")


def _literals(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((found for part in get_args(annotation) if (found := _literals(part))), ())


def fate_words(fate: Fate) -> str:
    """A fate in words."""
    match fate.kind:
        case "no_effect":
            return f"no effect: {fate.reason}"
        case "moved":
            return f"old key; use {fate.moved_to}" if fate.moved_to else f"old key without effect: {fate.reason}"
        case "refused":
            return f"refused: {fate.reason}"
        case "read":
            return "read"


def _sentence(owner: type[Section], name: str) -> str:
    """The string under a field, looked for in the class and then in those it inherits from."""
    for section in owner.__mro__:
        if issubclass(section, Section) and name in (sentences := _sentences(section)):
            return sentences[name]
    return ""


@cache
def _sentences(section: type[Section]) -> dict[str, str]:
    tree = _parsed(Path(inspect.getfile(section)))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == section.__name__).body
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf8"))


_INTRODUCTION: Final = """# Configuration

Every key that a configuration may have. This page is made from the schema by `mizzen config docs`; do not edit it.

- A configuration is a dict, a path to a JSON or HJSON file, such text itself, or urlsafe base64 of it.
- A key that is not on this page is an error, at any level.
- `"auto"` means: derive it, or take the default. Every key accepts it unless nothing could answer it.
- `null` means absent where the type says so. Whole numbers may be written as floats (`5e8`); a boolean is no number.
- *no effect* keys change nothing and are said to do so once; *refused* keys may only hold their default.
- Where a default differs from the one users know, [differences.md](differences.md) says why.
"""


def render_markdown() -> str:
    """The page `docs/config.md`: a table for each section, and one of old keys."""
    tables: dict[str, list[Explanation]] = {}
    old: list[Explanation] = []
    for key in catalogue():
        owner = key.path.rpartition(".")[0]
        (old if key.fate.kind == "moved" else tables.setdefault(owner, [])).append(key)
    parts = [_INTRODUCTION]
    for owner, keys in tables.items():
        parts += [f"## {f'`{owner}`' if owner else 'Top level'}", _table(keys)]
    rows = [f"| `{key.path}` | {f'`{key.fate.moved_to}`' if key.fate.moved_to else 'nothing'} |" for key in old]
    parts += ["## Old keys", "\n".join(["| old key | use instead |", "|---|---|", *rows])]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _table(keys: list[Explanation]) -> str:
    lines = ["| key | type | default | fate | meaning |", "|---|---|---|---|---|"]
    for key in keys:
        name = key.path.rpartition(".")[2]
        names = " or ".join(f"`{spelling}`" for spelling in (name, *key.fate.spellings))
        default = f"`{key.default}`" if key.default else ""
        lines.append(f"| {names} | {key.type} | {default} | {fate_words(key.fate)} | {key.sentence} |")
    return "\n".join(lines)


def json_schema() -> dict[str, Any]:
    """A JSON schema of the whole configuration, for editors; "auto" is allowed wherever `load` allows it."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **_object_schema(Config)}
    return {**schema, "title": "mizzen configuration"}


def _object_schema(section: type[Section]) -> dict[str, Any]:
    schema = section.model_json_schema(by_alias=False)
    for name, field in section.model_fields.items():
        nest, plain = nest_in(field.annotation), schema["properties"].pop(name)
        filled = _nest_schema(nest, NoneType in get_args(field.annotation)) if nest else _or_auto(plain)
        filled["description"] = _sentence(section, name)
        if fate_of(field).kind != "read":
            filled["description"] += f" ({fate_words(fate_of(field))})"
        for spelling in (name, *fate_of(field).spellings):
            schema["properties"][spelling] = filled
    return schema


def _nest_schema(nest: Nest, is_optional: bool) -> dict[str, Any]:
    inner = _object_schema(nest.section)
    if nest.kind == "table":
        inner = {"type": "object", "additionalProperties": inner}
    elif nest.kind == "list":
        inner = {"type": "array", "items": inner}
    return {"anyOf": [inner, {"type": "null"}]} if is_optional else inner


def _or_auto(schema: dict[str, Any]) -> dict[str, Any]:
    outer: dict[str, Any] = {key: schema.pop(key) for key in ("default", "deprecated") if key in schema}
    schema.pop("title", None)
    return {"anyOf": [schema, {"const": AUTO}], **outer} if schema else outer


@dataclass(frozen=True, slots=True)
class Findings:
    """The parsed configuration unless there are problems, and notes on keys that are old or without effect."""

    config: Config | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def examine(source: ConfigSource, *, pass_over: bool = False) -> Findings:
    """Look for every problem that can be found without knowing the number of ranks.

    With `pass_over`, as the drop-in does, keys that DeepSpeed does not read are notes.
    """
    try:
        raw = read_source(source)
        ignored = drop_ignored(raw, Config) if pass_over else []
        spread_paths(raw)
        unknown = name_keys(raw, Config)
    except ConfigError as error:
        return Findings(None, _split(error), ())
    for path, _ in unknown:
        _drop(raw, path)
    problems = [f"{path}: {message}" for path, message in unknown]
    try:
        config = load(raw)
    except ConfigError as error:
        problems += _unless_caused_by(unknown, _split(error))
        return Findings(None, tuple(dict.fromkeys(problems)), ())
    notes = (*(f"{key}: not read, there and here" for key in ignored), *_notes(raw, config))
    return Findings(None if problems else config, tuple(problems), notes)


def _split(error: ConfigError) -> tuple[str, ...]:
    return tuple(str(error).split("\n  also "))


def _drop(raw: Any, path: str) -> None:
    """Remove what stands at a path; keys may have dots, so each is compared whole."""
    holders = list(raw.items()) if isinstance(raw, dict) else list(enumerate(raw)) if isinstance(raw, list) else []
    for key, inner in holders:
        if path == str(key):
            del raw[key]
        elif path.startswith(f"{key}."):
            _drop(inner, path.removeprefix(f"{key}."))


def _unless_caused_by(unknown: list[Problem], found: tuple[str, ...]) -> Iterator[str]:
    """A key that is missing beside a misspelt one is most likely that one."""
    sections = {path.rpartition(".")[0] for path, _ in unknown}
    for problem in found:
        path, _, message = problem.partition(": ")
        if not (message.startswith("required here") and path.rpartition(".")[0] in sections):
            yield problem


def _notes(raw: dict[str, Any], config: Config) -> Iterator[str]:
    for found in walk(raw, Config):
        if found.fate.kind == "moved":
            yield f"{found.path}: {fate_words(found.fate)}"
        elif reason := why_without_effect(found, config):
            yield f"{found.path}: no effect: {reason}"
    if autos := config.autos():
        yield f'filled in by the client, where the file says "auto": {", ".join(autos)}'


def wrong_names(config: Config) -> Iterator[ConfigError]:
    """What `initialize` would say of the names in a configuration."""
    for section, check in ((config.optimizer, check_optimizer), (config.scheduler, check_scheduler)):
        try:
            if section is not None:
                check(section.type)
        except ConfigError as error:
            yield error
