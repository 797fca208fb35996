"""Every value of a configuration with its origin, as lines, as a table, or as a dict. It derives nothing."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from mizzen.config.schema import Config, Origin
from mizzen.config.section import Section, fate_of

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a configuration: where it stands, what it is, and who said so."""

    path: str
    value: Any
    origin: Origin


def values(config: Config, *, defaults: bool = True) -> Iterator[Value]:
    """Every value in the order of the schema; without `defaults` only what was given or derived."""
    for path, value in _leaves(config, ""):
        origin = config.origin(path)
        if defaults or origin.kind != "default":
            yield Value(path, value, origin)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    children = dict(_children(value))
    if not children:
        yield path, plain(value)
    for key, child in children.items():
        yield from _leaves(child, f"{path}.{key}" if path else key)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Section):
        for name, field in type(value).model_fields.items():
            if fate_of(field).kind != "moved":
                yield name, value.__dict__[name]
        yield from (value.model_extra or {}).items()
    elif isinstance(value, Mapping):
        yield from value.items()


def plain(value: Any) -> Any:
    """The value as JSON would hold it."""
    if isinstance(value, Section | Mapping):
        return {key: plain(child) for key, child in _children(value)}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def display(value: Any) -> str:
    """The value for people: as in JSON, but numbers above 1,000 in scientific notation, with every digit."""
    match plain(value):
        case bool(flag):
            return "true" if flag else "false"
        case None:
            return "null"
        case int() | float() as number:
            return _scientific(number) if abs(number) > 1000 else repr(number)
        case list(items):
            return f"[{', '.join(display(item) for item in items)}]"
        case dict(members):
            return f"{{{', '.join(f'{key}: {display(member)}' for key, member in members.items())}}}"
        case text:
            return json.dumps(text, ensure_ascii=False)


def _scientific(number: float) -> str:
    """5e+08 for 500,000,000. `format` would round 123,456,789 to six places, hence the digits themselves."""
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    if not isinstance(exponent, int):  # infinite
        return repr(number)
    text = "".join(map(str, digits))
    fraction = text[1:].rstrip("0")
    return f"{'-' * sign}{text[0]}{'.' * bool(fraction)}{fraction}e+{len(text) - 1 + exponent:02}"


def as_lines(found: Iterable[Value]) -> list[str]:
    """One line per value: path, value and origin in columns."""
    rows = [(item.path, display(item.value), str(item.origin)) for item in found]
    path_width, value_width = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    return [f"{path:{path_width}}  {value:{min(value_width, 40)}}  {origin}" for path, value, origin in rows]


def as_dict(found: Iterable[Value]) -> dict[str, dict[str, Any]]:
    """Path -> value and origin, for JSON; numbers stay as they are."""
    return {item.path: {"value": item.value, "origin": str(item.origin)} for item in found}


def as_table(found: Iterable[Value]) -> "Table":
    """A table for a terminal."""
    from rich.table import Table  # 60 ms that plain output does not pay

    table = Table("key", "value", "origin", box=None, header_style="bold")
    styles = {"given": "", "derived": "cyan", "default": "dim"}
    for item in found:
        table.add_row(item.path, display(item.value), str(item.origin), style=styles[item.origin.kind])
    return table
