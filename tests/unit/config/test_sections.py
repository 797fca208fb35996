"""The pieces that sections are made of: value types, fates, nesting, and lazy compilation."""

import copy
import json
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from mizzen.config.section import (
    AnyValue,
    Arguments,
    Count,
    CountOrAuto,
    Dtype,
    Fate,
    Flag,
    Frozen,
    Nest,
    NumberOrAuto,
    OpenSection,
    Positive,
    Ratio,
    Section,
    Size,
    Whole,
    also_spelled,
    deprecated,
    empty,
    fate_of,
    freeze,
    keys_of,
    nest_in,
    no_effect,
    refused,
    schema_keys,
    section,
    shown,
)


class Inner(Section):
    count: Count = 1
    """A count."""


class Outer(Section):
    flag: Flag = False
    """A flag."""
    ratio: Ratio = 0.5
    """A ratio."""
    size: Size = 10
    """A size."""
    whole: Whole | None = None
    """A whole number."""
    positive: Positive = 1.0
    """A number."""
    auto: CountOrAuto = "auto"
    """A count or a word."""
    factor: NumberOrAuto = "auto"
    """A number or a word."""
    dtype: Dtype | None = None
    """A format."""
    arguments: Arguments = empty()
    """Anything."""
    value: AnyValue = None
    """Anything at all."""
    inner: Inner = also_spelled(Inner, "within")
    """One section."""
    maybe: Inner | None = None
    """Perhaps one."""
    table: Mapping[str, Inner] = empty()
    """Some by name."""
    items: tuple[Inner, ...] = ()
    """Some in order."""


GOOD = [
    ("flag", True, True),
    ("ratio", 1, 1.0),
    ("size", 530841.6, 530841),
    ("size", 1e30, sys.maxsize),
    ("whole", 5e8, 500_000_000),
    ("whole", None, None),
    ("auto", "auto", "auto"),
    ("auto", 3.0, 3),
    ("factor", 0, 0.0),
    ("dtype", "FLOAT16", "fp16"),
    ("dtype", "torch.bfloat16", "bf16"),
    ("dtype", "float", "fp32"),
    ("value", [1, {"a": None}], (1, {"a": None})),
    ("inner", {"count": 2}, Inner(count=2)),
    ("table", {"a": {"count": 2}}, {"a": Inner(count=2)}),
    ("items", [{"count": 2}, {}], (Inner(count=2), Inner())),
]
BAD = [
    ("flag", 1),
    ("flag", "true"),
    ("ratio", 1.1),
    ("size", True),
    ("size", float("inf")),
    ("size", -1),
    ("whole", 1.5),
    ("whole", "1"),
    ("whole", False),
    ("positive", 0),
    ("auto", "AUTO"),
    ("auto", 0),
    ("factor", -1),
    ("dtype", "torch.int8"),
    ("dtype", 3),
    ("arguments", [1]),
    ("value", {1: 2}),
    ("value", float("nan")),
    ("value", 2**64),
    ("inner", None),
    ("inner", {"count": 0}),
    ("table", {"a": {"cuont": 1}}),
    ("items", {"count": 1}),
]


@pytest.mark.parametrize(("name", "given", "expected"), GOOD, ids=str)
def test_values_that_are_accepted(name, given, expected):
    found = Outer.model_validate({name: given}).__dict__[name]
    assert found == expected and type(found) is type(expected) or isinstance(found, Mapping)


@pytest.mark.parametrize(("name", "given"), BAD, ids=str)
def test_values_that_are_refused(name, given):
    with pytest.raises(ValidationError):
        Outer.model_validate({name: given})


def test_problems_inside_sections_keep_their_place():
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"inner": {"count": 0}, "table": {"a": {"count": 0}}, "items": [{}, {"count": 0}]})
    assert [problem["loc"] for problem in caught.value.errors()] == [
        ("inner", "count"),
        ("table", "a", "count"),
        ("items", 1, "count"),
    ]


def test_an_inner_section_is_compiled_only_when_it_is_given():
    class Lazy(Section):
        count: Count = 1

    class Around(Section):
        lazy: Lazy = section(Lazy)

    assert Around.model_validate({}).lazy == Lazy.model_construct()
    assert Around.__pydantic_complete__ and not Lazy.__pydantic_complete__
    assert Around.model_validate({"lazy": {"count": 3}}).lazy.count == 3
    assert Lazy.__pydantic_complete__


def test_sections_are_frozen_and_know_their_keys():
    with pytest.raises(ValidationError, match="frozen"):
        Inner().count = 2
    with pytest.raises(ValidationError, match="Extra inputs"):
        Inner.model_validate({"cuont": 2})

    class Open(OpenSection):
        count: Count = 1

    assert Open.model_validate({"other": 2}).model_extra == {"other": 2}


def test_fates():
    class Fates(Section):
        plain: Flag = False
        idle: Flag = no_effect(False, "why", "lazy")
        never: Flag = refused(False, "why not")
        old: Flag | None = deprecated("plain")

    fates = {name: fate_of(field) for name, field in Fates.model_fields.items()}
    assert fates == {
        "plain": Fate(),
        "idle": Fate("no_effect", "why", spellings=("lazy",)),
        "never": Fate("refused", "why not"),
        "old": Fate("moved", moved_to="plain"),
    }
    assert list(keys_of(Fates)) == ["plain", "idle", "never", "old", "lazy"]
    assert keys_of(Fates)["lazy"][0] == "idle"
    properties = Fates.model_json_schema()["properties"]
    assert properties["old"]["deprecated"] is True and "deprecated" not in properties["idle"]


def test_nesting():
    kinds = {name: nest_in(field.annotation) for name, field in Outer.model_fields.items()}
    assert {name: nest for name, nest in kinds.items() if nest} == {
        "inner": Nest(Inner),
        "maybe": Nest(Inner),
        "table": Nest(Inner, "table"),
        "items": Nest(Inner, "list"),
    }
    assert nest_in(Mapping[str, Any]) is None and nest_in(tuple[int, ...]) is None
    assert list(Nest(Inner, "table").objects({"a": {}, "b": 3})) == [(".a", {})]
    assert list(Nest(Inner, "list").objects([1, {}])) == [(".1", {})]
    assert list(Nest(Inner, "list").objects({})) == [] and list(Nest(Inner, "table").objects(3)) == []


def test_places_name_every_key_and_hand_fates_down():
    class Idle(Section):
        outer: Outer = no_effect(Outer, "whole section")

    found = {place.path: place.fate for place in schema_keys(Idle)}
    assert {"outer.inner.count", "outer.table.<name>.count", "outer.items.<index>.count"} <= found.keys()
    assert {fate.kind for fate in found.values()} == {"no_effect"}


def test_frozen_objects_are_dicts_that_cannot_be_changed():
    frozen = freeze({"a": [1, {"b": 2}]})
    assert frozen == {"a": (1, {"b": 2})} and json.dumps(frozen) == '{"a": [1, {"b": 2}]}'
    for change in (
        lambda: frozen.update(a=1),
        lambda: frozen["a"][1].pop("b"),
        lambda: frozen.__setitem__("a", 1),
        lambda: frozen.setdefault("c", 1),
        lambda: frozen.__ior__({"c": 1}),
    ):
        with pytest.raises(TypeError, match="a configuration cannot be changed; load a new one"):
            change()
    for twin in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        assert twin == frozen and type(twin) is Frozen


def test_values_in_messages_are_json_and_short():
    assert [shown(value) for value in (None, True, 2.0, 1e-5, "a", [1], {"a": 1})] == [
        *("null", "true", "2", "1e-05", '"a"', "[1]", '{"a": 1}')
    ]
    assert shown("x" * 100) == '"' + "x" * 56 + "..."
    assert shown(10**5000) == "a number of 16610 bits" and shown(object()) == "a value of type object"
