"""The types of single values in the configuration: strict, in the words of JSON, and no section.

An integral float such as 5e8 is a whole number, a boolean is not, and nothing is ever read out of a string.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from numbers import Real as AnyReal
from typing import Annotated, Any, Final, Literal, NoReturn

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema


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
NumberOrAuto = Annotated[
    float | Literal["auto"],
    _or_auto(real, 0),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"const": "auto"}]}),
    Words('number >= 0 or "auto"'),
]
