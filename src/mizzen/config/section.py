"""The base of every section of the configuration, the types of its values, and the fate that each of its keys declares.

A field is the key, the string under it is its documentation, and its default says what happens when it is absent.
Types are strict, in the words of JSON: an integral float such as 5e8 is a whole number, a boolean is not, and nothing
is ever read out of a string. Files and errors are the business of `load.py`, the words of `describe.py`.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from numbers import Real as AnyReal
from types import UnionType
from typing import Annotated, Any, Final, Literal, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, PlainValidator, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

FateKind = Literal["read", "no_effect", "refused", "moved"]


@dataclass(frozen=True, slots=True)
class Words:
    """The name of a type in documentation."""

    text: str


def shown(value: Any) -> str:
    """A value in a message: as JSON where it is JSON, and never long."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        value = int(value)
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        # ValueError: Python refuses to print integers of more than 4300 digits.
        kind = f"a number of {value.bit_length()} bits" if isinstance(value, int) else None
        text = kind or f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _number(value: Any, kind: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, AnyReal):
        raise ValueError(f"{shown(value)} is not {kind}")
    if not isinstance(value, int) and not math.isfinite(value):
        raise ValueError(f"{shown(value)} is not a finite number")
    return value


def whole(value: Any) -> int:
    """The value as an integer, if it is a whole number."""
    if int(_number(value, "a whole number")) != value:
        raise ValueError(f"{shown(value)} is not a whole number")
    return _in_64_bits(int(value))


def _in_64_bits(value: int) -> int:
    if abs(value) > sys.maxsize:
        raise ValueError(f"{shown(value)} does not fit into 64 bits")
    return value


def real(value: Any) -> float:
    """The value as a float, if it is a finite number."""
    try:
        return float(_number(value, "a number"))
    except OverflowError:
        raise ValueError(f"{shown(value)} is too large for a number") from None


def size(value: Any) -> int:
    """The value rounded down: clients compute sizes such as 0.9 * hidden * hidden."""
    return min(int(_number(value, "a number")), sys.maxsize)


def flag(value: Any) -> bool:
    """The value, if it is true or false; nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise ValueError(f"{shown(value)} is not true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a string")
    return value


def _nonempty(value: Any) -> str:
    if not _text(value):
        raise ValueError("an empty string is not a name")
    return str(value)


def _pattern(value: Any) -> str:
    try:
        re.compile(_nonempty(value))
    except re.error as error:
        raise ValueError(f"{shown(value)} is not a regular expression: {error}") from None
    return str(value)


_DTYPES: Final = {
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}


def _dtype(value: Any) -> str:
    """`float16`, `torch.float16` and the torch object itself are `fp16`."""
    text = value if isinstance(value, str) else str(value)
    name = _DTYPES.get(text.lower().removeprefix("torch."))
    if name is None or not (isinstance(value, str) or text.startswith("torch.")):
        raise ValueError(f'{shown(value)} is not one of ["fp32", "fp16", "bf16"]')
    return name


def integral(value: Any) -> Any:
    """2.0 as 2, for a type that lists whole numbers; true is not 1, and anything else stays as it is."""
    if isinstance(value, bool):
        raise ValueError(f"{shown(value)} is not a whole number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def lower(value: Any) -> Any:
    """A word without regard to case."""
    return value.lower() if isinstance(value, str) else value


def capitalized(value: Any) -> Any:
    """A word without regard to case, shown with a capital."""
    return value.capitalize() if isinstance(value, str) else value


class BelowError(ValueError):
    """Something is wrong below a key that holds a free value."""

    def __init__(self, below: str, message: str) -> None:
        super().__init__(below, message)
        self.below = below
        self.message = message

    def __str__(self) -> str:
        return self.message


class Frozen(dict[str, Any]):
    """A JSON object of the user's own keys that cannot be changed; its lists are tuples."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a configuration cannot be changed; load a new one")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type["Frozen"], tuple[dict[str, Any]]]:
        """Copying and pickling would otherwise fill an empty one key by key."""
        return Frozen, (dict(self),)


def freeze(value: Any, path: str = "") -> Any:
    """A frozen copy of any JSON value; what is no JSON is an error that knows its place below the key."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise BelowError(path, f"{key!r} is not a key: keys are strings")
        return Frozen({key: freeze(inner, f"{path}.{key}") for key, inner in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(inner, f"{path}.{index}") for index, inner in enumerate(value))
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Integral):
        if abs(number := int(value)) > sys.maxsize:
            raise BelowError(path, f"{shown(value)} does not fit into 64 bits")
        return number
    if not isinstance(value, AnyReal):
        raise BelowError(path, f"{shown(value)} is not a JSON value")
    if not math.isfinite(value):
        raise BelowError(path, f"{shown(value)} is not a finite number")
    return float(value)


def _freeze_object(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{shown(value)} is not an object of keys")
    return freeze(value)


def _or_auto(convert: Callable[[Any], Any], least: float) -> PlainValidator:
    """A validator for a key with "auto" among its own words. One function, because a union reports every branch."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value == "auto":
            return value
        try:
            number = convert(value)
        except ValueError as error:
            raise ValueError(f'{error}, nor "auto"') from None
        if number < least:
            raise ValueError(f"{shown(value)} is below the least allowed value, {least}")
        return number

    return PlainValidator(check)


# The range comes first: it then belongs to the number itself, which is what a JSON schema needs.
Integer = Annotated[int, BeforeValidator(whole), Words("whole number")]
Whole = Annotated[int, Field(ge=0), BeforeValidator(whole), Words("whole number >= 0")]
Count = Annotated[int, Field(ge=1), BeforeValidator(whole), Words("whole number >= 1")]
Size = Annotated[int, Field(ge=0), BeforeValidator(size), Words("size >= 0")]
BucketSize = Annotated[int, Field(ge=1), BeforeValidator(size), Words("size >= 1")]
FromMinusOne = Annotated[int, Field(ge=-1), BeforeValidator(whole), Words("whole number >= -1")]
Positive = Annotated[float, Field(gt=0), BeforeValidator(real), Words("number > 0")]
NotNegative = Annotated[float, Field(ge=0), BeforeValidator(real), Words("number >= 0")]
Ratio = Annotated[float, Field(ge=0, le=1), BeforeValidator(real), Words("number 0..1")]
Flag = Annotated[bool, BeforeValidator(flag), Words("true or false")]
Text = Annotated[str, BeforeValidator(_text), Words("string")]
Name = Annotated[str, BeforeValidator(_nonempty), Words("string")]
Pattern = Annotated[str, BeforeValidator(_pattern), Words("regular expression")]
Dtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_dtype)]
Opaque = Annotated[Any, Words("object")]
AnyValue = Annotated[Any, PlainValidator(freeze), Words("any JSON value")]
Arguments = Annotated[
    Mapping[str, Any],
    PlainValidator(_freeze_object),
    WithJsonSchema({"type": "object"}),
    Words("object of your own keys"),
]
CountOrAuto = Annotated[
    int | Literal["auto"],
    _or_auto(whole, 1),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
    Words('whole number >= 1 or "auto"'),
]
SizeOrAuto = Annotated[
    int | Literal["auto"],
    _or_auto(size, 0),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"const": "auto"}]}),
    Words('size >= 0 or "auto"'),
]
NumberOrAuto = Annotated[
    float | Literal["auto"],
    _or_auto(real, 0),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"const": "auto"}]}),
    Words('number >= 0 or "auto"'),
]


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
class SchemaKey:
    """One key of the schema; its path has `<name>` and `<index>` where the user's own names or a list stand."""

    path: str
    name: str
    field: FieldInfo
    owner: type[Section]
    fate: Fate
    """The key's own fate, or that of the section around it if its own is to be read."""


def schema_keys(section: type[Section], path: str = "", around: Fate = _READ) -> Iterator[SchemaKey]:
    """Every key of a section and of the sections inside it, parents first."""
    for name, field in section.model_fields.items():
        fate = fate_of(field) if fate_of(field).kind != "read" or around.kind == "read" else around
        place = SchemaKey(f"{path}{name}", name, field, section, fate)
        yield place
        if nest := nest_in(field.annotation):
            step = {"one": ".", "table": ".<name>.", "list": ".<index>."}[nest.kind]
            yield from schema_keys(nest.section, f"{place.path}{step}", fate)
