"""The base of every section of the configuration, and the fate that each of its keys declares.

A field is the key, the string under it is its documentation, and its default says what happens when it is absent.
The types of values are in `values.py`; files and errors are `load.py`'s business, the words `describe.py`'s.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from mizzen.config.values import Frozen

FateKind = Literal["read", "no_effect", "refused", "moved"]


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a key: it is read, accepted without effect, refused, or moved to another path."""

    kind: FateKind = "read"
    reason: str = ""
    moved_to: str = ""
    convert: Callable[[Any], Any] | None = None
    spellings: tuple[str, ...] = ()
    """Other names under which users have the same key in their files."""

    def __call__(self, schema: dict[str, Any]) -> None:
        """pydantic's hook for what a field adds to its JSON schema."""
        if self.kind == "moved":
            schema["deprecated"] = True


_READ = Fate()


class Section(BaseModel):
    """One JSON object of the configuration: frozen, and every key of it known."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, protected_namespaces=())

    @classmethod
    def from_old_form(cls, value: Any) -> dict[str, Any] | None:
        """The keys that a value which is no object stands for in old files; None where there was no such form."""
        return None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A section inside another is compiled when it is first given, not with its parent.

        Most files use six sections of sixty; compiling all of them takes longer than the rest of `load`.
        """
        if handler.field_name is None:
            return handler(source)
        return core_schema.no_info_before_validator_function(cls._of, core_schema.any_schema())

    @classmethod
    def _of(cls, value: Any) -> "Section":
        return value if isinstance(value, cls) else cls.model_validate(value)


class OpenSection(Section):
    """A section whose further keys are the user's own, such as the arguments of another library."""

    model_config = ConfigDict(extra="allow")


def _key(default: Any, fate: Fate) -> Any:
    # model_construct: a default section holds defaults only, so there is nothing to validate and nothing to compile.
    # Sections are frozen, so that one will do for all.
    if isinstance(default, type) and issubclass(default, Section):
        return Field(default_factory=cache(default.model_construct), json_schema_extra=fate)
    return Field(default, json_schema_extra=fate)


def section(default: type[Section]) -> Any:
    """A section that is always there; absent means all its defaults."""
    return _key(default, _READ)


def empty() -> Any:
    """An object of the user's own keys, or a table of sections by the user's own names, that is empty unless given."""
    return Field(default_factory=Frozen, json_schema_extra=_READ)


def also_spelled(default: Any, *spellings: str) -> Any:
    """A key with other names that mean the same."""
    return _key(default, Fate(spellings=spellings))


def no_effect(default: Any, reason: str, *spellings: str) -> Any:
    """A key that users have in their files and that changes nothing here, with the reason."""
    return _key(default, Fate("no_effect", reason, spellings=spellings))


def refused(default: Any, reason: str, *spellings: str) -> Any:
    """A key that may only be absent or hold its default, with the reason and the way out."""
    return _key(default, Fate("refused", reason, spellings=spellings))


def deprecated(moved_to: str = "", convert: Callable[[Any], Any] | None = None, message: str = "") -> Any:
    """An old key: its converted value is set at `moved_to`, a path from the root; empty means that it is dropped."""
    return _key(None, Fate("moved", message, moved_to, convert))


def fate_of(field: FieldInfo) -> Fate:
    """The fate that a field declares."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, Fate) else _READ


@cache
def keys_of(section: type[Section]) -> dict[str, tuple[str, FieldInfo]]:
    """Every accepted spelling of every key: spelling -> (field name, field)."""
    fields = section.model_fields
    others = {other: (name, field) for name, field in fields.items() for other in fate_of(field).spellings}
    return {name: (name, field) for name, field in fields.items()} | others


@dataclass(frozen=True, slots=True)
class Nest:
    """How a field holds sections: one, a table of them by the user's own names, or a list."""

    section: type[Section]
    kind: Literal["one", "table", "list"] = "one"

    def objects(self, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every raw object in the field's value that is such a section, with its path below the field."""
        if self.kind == "one":
            found = [("", value)]
        elif self.kind == "table":
            found = [(f".{name}", inner) for name, inner in value.items()] if isinstance(value, dict) else []
        else:
            found = [(f".{index}", inner) for index, inner in enumerate(value)] if isinstance(value, list) else []
        return ((path, inner) for path, inner in found if isinstance(inner, dict))


def nest_in(annotation: Any) -> Nest | None:
    """The sections inside a field's type: `A`, `A | None`, `Mapping[str, A]`, `tuple[A, ...]`; None without any."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Nest(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return next((nest for part in arguments if (nest := nest_in(part))), None)
    inner = nest_in(arguments[1 if origin is Mapping else 0]) if origin in (Mapping, tuple) else None
    return inner and Nest(inner.section, "table" if origin is Mapping else "list")


@dataclass(frozen=True, slots=True)
class Place:
    """One key of the schema; its path has `<name>` and `<index>` where the user's own names or a list stand."""

    path: str
    name: str
    field: FieldInfo
    owner: type[Section]
    fate: Fate
    """The key's own fate, or that of the section around it if its own is to be read."""


def places(section: type[Section], path: str = "", around: Fate = _READ) -> Iterator[Place]:
    """Every key of a section and of the sections inside it, parents first."""
    for name, field in section.model_fields.items():
        fate = fate_of(field) if fate_of(field).kind != "read" or around.kind == "read" else around
        place = Place(f"{path}{name}", name, field, section, fate)
        yield place
        if nest := nest_in(field.annotation):
            step = {"one": ".", "table": ".<name>.", "list": ".<index>."}[nest.kind]
            yield from places(nest.section, f"{place.path}{step}", fate)
