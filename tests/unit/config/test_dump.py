"""Every value with its origin: nothing lost, no digit dropped."""

import io
import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mizzen.config import load
from mizzen.config.resolve import resolve
from mizzen.config.schema import as_dict, as_json, as_lines, as_table, display, plain, values

GIVEN = {
    "train_batch_size": 64,
    "bfloat16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "cpu_offload": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "fused": "auto"}},
    "gradient_clipping": "auto",
}


def dumped(**options):
    return {item.path: item for item in values(resolve(load(GIVEN), 8).config, **options)}


def test_given_and_derived_values_are_shown_and_defaults_only_on_demand():
    short, whole = dumped(defaults=False), dumped()
    assert str(short["train_batch_size"].origin) == "given"
    assert str(short["train_micro_batch_size_per_gpu"].origin) == "derived from train_batch_size with dp = 8"
    assert "zero_optimization.allgather_bucket_size" not in short
    assert str(whole["zero_optimization.allgather_bucket_size"].origin) == "default"
    assert {item.origin.kind for item in short.values()} == {"given", "derived"}
    assert short.items() <= whole.items()


def test_a_value_stands_at_its_own_place_whatever_the_file_called_it():
    found = dumped()
    assert found["bf16.enabled"].value is True
    assert found["bf16.enabled"].origin.kind == "given"
    assert found["zero_optimization.offload_optimizer.device"].value == "cpu"
    assert str(found["zero_optimization.offload_optimizer.device"].origin) == "given as zero_optimization.cpu_offload"
    assert "zero_optimization.cpu_offload" not in found


def test_the_users_own_keys_are_values_too():
    found = dumped()
    assert found["optimizer.params.betas"].value == [0.9, 0.95]
    assert found["optimizer.params.lr"].origin.kind == "given"


def test_auto_is_a_default_that_says_so():
    assert str(dumped()["gradient_clipping"].origin) == 'default asked for as "auto"'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5e8, "5e+08"),
        (500_000_000, "5e+08"),
        (1000, "1000"),
        (1001, "1.001e+03"),
        (1000.5, "1.0005e+03"),
        (-2500, "-2.5e+03"),
        (123_456_789, "1.23456789e+08"),
        (10**100, "1e+100"),
        (1.5e300, "1.5e+300"),
        (float("inf"), "inf"),
        (0.5, "0.5"),
        (1e-8, "1e-08"),
        (0, "0"),
        (True, "true"),
        (False, "false"),
        (None, "null"),
        ("auto", '"auto"'),
        ("été", '"été"'),
        ([1, 2000, "x"], '[1, 2e+03, "x"]'),
        ((), "[]"),
        ({"a": None, "b": {"c": 4096}}, "{a: null, b: {c: 4.096e+03}}"),
    ],
)
def test_values_are_shown_as_users_know_them(value, text):
    assert display(value) == text


@given(st.integers(min_value=-(10**40), max_value=10**40) | st.floats(allow_nan=False, allow_infinity=False))
def test_no_digit_is_lost(number):
    assert Decimal(display(number)) == Decimal(repr(number))


def test_lines_are_in_columns():
    lines = as_lines(dumped(defaults=False).values())
    assert lines[0].split() == ["train_batch_size", "64", "given"]
    bucket = next(line for line in lines if "reduce_bucket_size" in line)
    assert bucket.split() == ["zero_optimization.reduce_bucket_size", "5e+08", "given"]
    assert len({line.index(line.split()[1]) for line in lines}) == 1
    assert as_lines([]) == []


def test_the_dict_is_json_with_plain_numbers():
    found = json.loads(json.dumps(as_dict(dumped().values())))
    assert found["zero_optimization.reduce_bucket_size"] == {"value": 500_000_000, "origin": "given"}
    assert found["optimizer.params.betas"]["value"] == [0.9, 0.95]


def test_the_table_has_a_row_for_every_value():
    console = Console(width=200, file=io.StringIO())
    found = dumped(defaults=False)
    console.print(as_table(found.values()))
    text = console.file.getvalue()
    assert all(path in text for path in found)
    assert "5e+08" in text


def test_what_json_does_not_have_is_shown_as_text():
    assert plain({"a": (1, {2}), "b": 1 + 2j}) == {"a": [1, [2]], "b": "(1+2j)"}


def test_equal_configurations_have_one_text_whatever_the_order_of_their_keys():
    turned = dict(reversed([*GIVEN.items()])) | {
        "zero_optimization": dict(reversed(GIVEN["zero_optimization"].items()))
    }
    texts = [as_json(resolve(load(given), 8).config) for given in (GIVEN, turned, GIVEN | {"train_batch_size": 128})]
    assert texts[0] == texts[1] != texts[2]
    assert json.loads(texts[0])["zero_optimization"]["stage"] == 2
