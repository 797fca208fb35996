"""The interpreter of pickles: what it makes of allowed names, and that it makes nothing of others."""

import datetime
import enum
import pickle
import pickletools
import sys
from types import ModuleType

import pytest

from mizzen.checkpoint.foreign import pickles
from mizzen.checkpoint.foreign.pickles import STEPS, STOP
from mizzen.checkpoint.foreign.values import Inert, Name, TooDeep, plain
from mizzen.errors import CheckpointError
from unit.checkpoint.foreign.malice import called, laughs, stream, text


def load(data, **arguments):
    return pickles.load(data, "file", **arguments)[0]


@pytest.fixture
def package():
    """A package with classes of every kind, importable while a test runs."""
    module = ModuleType("shipyard")

    class Hull:
        def __init__(self):
            self.planks = 3

    class Slotted:
        __slots__ = ("a",)

        def __init__(self):
            self.a = 1

    class Cargo(dict):
        pass

    class Sail(enum.Enum):
        JIB = "jib"

    class Custom:
        def __reduce__(self):
            return (Custom, (), {"state": 1}, iter([1, 2]), iter([("k", "v")]))

    for kind in (Hull, Slotted, Cargo, Sail, Custom):
        kind.__module__, kind.__qualname__ = "shipyard", kind.__name__
        setattr(module, kind.__name__, kind)
    sys.modules["shipyard"] = module
    yield module
    del sys.modules["shipyard"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_objects_become_placeholders_when_their_package_is_named(package, protocol):
    value = [package.Hull(), package.Slotted(), package.Cargo(a=1), package.Sail.JIB, package.Custom()]
    data = pickle.dumps(value, protocol)
    hull, slotted, cargo, sail, custom = load(data, packages=("shipyard",))
    assert all(isinstance(found, Inert) for found in (hull, slotted, cargo, sail, custom))
    assert (hull.name, hull.get("planks"), hull.get("masts")) == ("shipyard.Hull", 3, None)
    assert slotted.get("a") == 1
    assert cargo.items == ["a", 1]
    assert (sail.name, sail.args) == ("shipyard.Sail", ("jib",))
    assert (custom.items, custom.get("state")) == ([1, 2, "k", "v"], 1)
    with pytest.raises(CheckpointError, match=r"refused 'shipyard.Hull' at byte .*inert=\('shipyard',\)"):
        load(data)
    with pytest.raises(CheckpointError, match="refused 'shipyard.Hull'"):
        load(data, packages=("ship",))


def test_placeholders_as_plain_data():
    assert plain(Inert("a.B", (1,), {"x": [Name("c", "D")]})) == {
        "class": "a.B",
        "args": (1,),
        "state": {"x": [{"class": "c.D"}]},
    }


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_plain_values(protocol):
    value = {"a": [1, -1, 2**31, -(2**40), 2.5, None, True, False, "é\ud800", b"x" * 300, (), (1,), (1, 2, 3, 4)]}
    if protocol > 1:
        value |= {"day": datetime.date(2024, 2, 29)}
        found = load(pickle.dumps(value, protocol))
        assert found.pop("day").name == "datetime.date"
        value.pop("day")
    else:  # integers beyond 32 bits and bytes are text in protocol 1, which torch never wrote
        value = {"a": [1, -1, 2.5, None, "é", (), (1,), (1, 2)]}
        found = load(pickle.dumps(value, protocol))
    assert found == value


def test_every_instruction_is_known_or_refused_on_purpose():
    refused = {code.name for code in pickletools.opcodes if ord(code.code) not in STEPS and ord(code.code) != STOP}
    assert refused == {
        *("INT", "LONG", "FLOAT", "STRING", "UNICODE", "GET", "PUT"),  # text, of protocol 0
        *("INST", "OBJ", "PERSID"),  # old ways to call and to refer
        *("NEXT_BUFFER", "READONLY_BUFFER"),  # data outside of the pickle
    }


def test_a_pickle_knows_its_end():
    first, at = pickles.load(b"\x80\x02K\x01.\x80\x02K\x02.", "file")
    second, end = pickles.load(b"\x80\x02K\x01.\x80\x02K\x02.", "file", at=at)
    assert (first, second, at, end) == (1, 2, 5, 10)


def test_what_is_shared_stays_shared():
    tree = plain(load(stream(laughs(12))))
    count = 0
    while tree:
        assert tree[0] is tree[1]
        tree, count = tree[0], count + 1
    assert count == 12


def test_what_is_endless_when_written_out_is_refused():
    with pytest.raises(CheckpointError, match="values are shared: written out there are endlessly many"):
        load(stream(laughs(60)))


def test_depth_is_bounded():
    with pytest.raises(TooDeep, match="nested more than 100 deep"):
        plain(load(stream(b"]" * 200 + b"a" * 199)))


def test_the_budget_counts_copies(monkeypatch):
    monkeypatch.setattr(pickles, "VALUES", 1000)
    body = b"](" + b"N" * 100 + b"eq\x010" + b"](" + called("builtins", "set", b"h\x01") * 20 + b"e"
    with pytest.raises(CheckpointError, match="more than 1,000 values"):
        load(stream(body))


def test_calls_of_placeholders_keep_their_arguments():
    found = load(stream(called("deepspeed.a", "b", text("x"), b"K\x05")))
    assert (found.name, found.args) == ("deepspeed.a.b", ("x", 5))
