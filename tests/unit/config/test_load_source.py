"""Where a configuration comes from: dicts of any kind, files, text with and without comments, base64."""

import base64
import json
from collections import OrderedDict
from types import MappingProxyType

import pytest

from mizzen.config.load import DEEPEST, read_source
from mizzen.errors import ConfigError

CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}}
HJSON = """
# comments of three kinds
{
  train_batch_size: 8   // here
  zero_optimization: {
    /* and here */ stage: 2,
  },
  "optimizer": {type: "Adam"}
}
"""


def test_a_dict_is_copied_to_the_last_level():
    found = read_source(CONFIG)
    assert found == CONFIG and found["zero_optimization"] is not CONFIG["zero_optimization"]
    found["zero_optimization"]["stage"] = 3
    assert CONFIG["zero_optimization"]["stage"] == 2


def test_mappings_and_sequences_of_any_kind_become_plain():
    source = MappingProxyType({"a": OrderedDict(b=MappingProxyType({"c": (1, [2])}))})
    assert read_source(source) == {"a": {"b": {"c": [1, [2]]}}}
    assert type(read_source(source)["a"]["b"]) is dict


@pytest.mark.parametrize("text", [json.dumps(CONFIG), "  \n" + json.dumps(CONFIG, indent=2)])
def test_json_text(text):
    assert read_source(text) == CONFIG


@pytest.mark.parametrize(
    "text", [json.dumps(CONFIG), HJSON, "\ufeff" + json.dumps(CONFIG)], ids=["json", "hjson", "bom"]
)
def test_a_file_by_path_or_name(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf8")
    assert read_source(path) == CONFIG and read_source(str(path)) == CONFIG


@pytest.mark.parametrize("text", [json.dumps(CONFIG), HJSON], ids=["json", "hjson"])
def test_base64(text):
    assert read_source(base64.urlsafe_b64encode(text.encode()).decode()) == CONFIG


def test_urlsafe_letters_of_base64():
    text = '{"a": "~~~???>>>"}'
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    assert set("-_") & set(encoded)
    assert read_source(encoded) == {"a": "~~~???>>>"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "b.c: given more than once in the same object (duplicate keys: c)"),
        ('{"a": [{"b": 1, "b": 2}]}', "a.0.b: given more than once in the same object (duplicate keys: b)"),
        ("{a: 1\n a: 2 # twice\n}", "a: given more than once in the same object (duplicate keys: a)"),
        ('{"b": 1, "a": 2, "b": 3, "a": 4}', "a: given more than once in the same object (duplicate keys: a, b)"),
        ('{"a" 1}', "the given text is neither JSON nor HJSON: Expecting ':' delimiter at line 1, column 6"),
        ("config.json", "'config.json' is neither an existing file, nor JSON, nor urlsafe base64 of JSON"),
        ("train", "'train' is neither an existing file, nor JSON, nor urlsafe base64 of JSON"),
        ("", "'' is neither an existing file, nor JSON, nor urlsafe base64 of JSON"),
        (None, "a configuration is a dict, a path, or text; this is a NoneType"),
        (["a"], "a configuration is a dict, a path, or text; this is a list"),
        ({3: 4}, "3: keys are strings, not of type int"),
        ({"a": [{"b": {None: 4}}]}, "a.0.b.None: keys are strings, not of type NoneType"),
        (
            '{"a": ' * 20_000,
            "the given text is nested too deeply",
        ),
    ],
    ids=lambda part: str(part)[:30],
)
def test_what_is_no_configuration(source, message):
    with pytest.raises(ConfigError) as caught:
        read_source(source)
    assert str(caught.value) == message


def test_a_number_without_end_in_json_and_hjson():
    for text in ('{"a": %s}', "{a: %s # b\n}"):
        with pytest.raises(ConfigError, match="^the given text cannot be read: Exceeds the limit"):
            read_source(text % ("1" * 5000))


def test_an_object_that_contains_itself_and_one_that_is_too_deep():
    endless = {}
    endless["one"] = endless["other"] = endless
    deep = {}
    for _ in range(DEEPEST + 1):
        deep = {"a": deep}
    for source in (endless, deep, json.dumps(deep)):
        with pytest.raises(ConfigError, match=f"^nested too deeply: more than {DEEPEST} levels"):
            read_source(source)
    assert read_source(deep["a"])


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"^cannot read .*absent\.json: No such file"):
        read_source(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="^cannot read .*: Is a directory"):
        read_source(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match=r"bytes\.json is not UTF-8 text"):
        read_source(tmp_path / "bytes.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"list\.json holds a list, not an object of keys"):
        read_source(tmp_path / "list.json")


def test_a_long_text_is_shown_in_part():
    with pytest.raises(ConfigError) as caught:
        read_source("x" * 5000)
    assert len(str(caught.value)) < 300
