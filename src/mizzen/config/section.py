"""The base of every section of the configuration: its strict value types and the fate that each key declares.

A field is the key, the string under it is its documentation, and its default says what happens when it is absent.
Reading files and reporting errors is `load.py`'s business; the words under the fields are read by `describe.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

FateKind = Literal["read", "no_effect", "refused", "moved"]


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a key: it is read, accepted without effect, refused, or moved to another path."""

    kind: FateKind = "read"
    reason: str = ""
    moved_to: str = ""
    convert: Callable[[Any], Any] | None = None


_READ = Fate()


def no_effect(default: Any, reason: str, **options: Any) -> Any:
    """A key that users have in their files and that changes nothing here, with the reason."""
    return Field(default, json_schema_extra={"fate": Fate("no_effect", reason)}, **options)  # type: ignore[dict-item]


def refused(default: Any, reason: str, **options: Any) -> Any:
    """A key that may only be absent or hold its default, with the reason and the way out."""
    return Field(default, json_schema_extra={"fate": Fate("refused", reason)}, **options)  # type: ignore[dict-item]


def deprecated(moved_to: str = "", convert: Callable[[Any], Any] | None = None, message: str = "") -> Any:
    """An old key: its converted value is set at `moved_to`, a path from the root; empty means that it is dropped."""
    fate = Fate("moved", message, moved_to, convert)
    return Field(None, json_schema_extra={"fate": fate}, deprecated=True)  # type: ignore[dict-item]


def fate_of(field: FieldInfo) -> Fate:
    """The fate that a field declares."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and isinstance(found := extra.get("fate"), Fate):
        return found
    return _READ


def _whole(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a whole number")
    if not math.isfinite(value) or int(value) != value:
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def _real(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{value!r} is too large for a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def _flag(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false")
    return value


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return value


Integer = Annotated[int, BeforeValidator(_whole)]
"""Any whole number; integral floats such as 5e8 count, booleans do not."""
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
"""A whole number of at least 0."""
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
"""A whole number of at least 1."""
Real = Annotated[float, BeforeValidator(_real)]
"""Any finite number."""
Positive = Annotated[float, BeforeValidator(_real), Field(gt=0)]
"""A finite number above 0."""
NotNegative = Annotated[float, BeforeValidator(_real), Field(ge=0)]
"""A finite number of at least 0."""
Ratio = Annotated[float, BeforeValidator(_real), Field(ge=0, le=1)]
"""A number from 0 to 1."""
Flag = Annotated[bool, BeforeValidator(_flag)]
"""true or false, nothing that merely looks like it."""
Text = Annotated[str, BeforeValidator(_text)]
"""A string."""


class Section(BaseModel):
    """One JSON object of the configuration: frozen, and every key of it known."""

    # defer_build: a validator is compiled when its section is first used, which keeps `import mizzen.config` short.
    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, defer_build=True, protected_namespaces=(), validate_default=False
    )

    exclusive: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of keys of which only one may be given."""


class OpenSection(Section):
    """A section whose further keys are the user's own, such as the arguments of an optimizer."""

    model_config = ConfigDict(extra="allow")


def section_in(annotation: Any) -> type[Section] | None:
    """The section class inside a field's type: `ZeroConfig`, `ZeroConfig | None`, but not `list[ZeroConfig]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if isinstance(get_origin(annotation), type) and get_origin(annotation) is not UnionType:
        return None
    return next((found for part in get_args(annotation) if (found := section_in(part))), None)


def keys_of(section: type[Section]) -> dict[str, tuple[str, FieldInfo]]:
    """Every accepted spelling of every key: spelling -> (field name, field)."""
    spellings: dict[str, tuple[str, FieldInfo]] = {}
    for name, field in section.model_fields.items():
        spellings[name] = (name, field)
        if field.alias:
            spellings[field.alias] = (name, field)
    return spellings
