"""Values that JSON alone would lose come back as they were; others are refused by path and type."""

import datetime
import json
import math
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from enum import Enum
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mizzen.checkpoint.tagged_json import Encoder, decode, pack, unpack
from mizzen.errors import CheckpointError, UsageError


def there_and_back(value):
    encoder = Encoder("client_state")
    text = json.dumps(encoder.encode(value), allow_nan=False)
    return decode(json.loads(text), encoder.tensors.__getitem__)


KEPT = [
    None, True, 7, -(2**70), 1.5, float("inf"), "text", "", b"\x00\xff", bytearray(b"a"), 1 + 2j,
    (1, (2, "a")), {3: "three", (1, 2): [4]}, {"$tuple": 1}, {1, 2}, frozenset({"a"}), [], {}, (),
    Path("a/b"), datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC), datetime.date(2026, 1, 2),
    datetime.time(1, 2), datetime.timedelta(days=-1, microseconds=3), torch.float16, torch.device("cuda", 1),
    OrderedDict([("b", 1), ("a", 2)]), Namespace(lr=0.1, betas=(0.9, 0.99)), numpy.float32(1.25), numpy.int64(-3),
    numpy.bool_(True), numpy.float64("inf"), Counter({3: 2, "a": -1}), torch.Size([2, 3]), PurePosixPath("a/b"),
    torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("value", KEPT, ids=repr)
def test_it_comes_back_as_it_was(value):
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value) or isinstance(value, PurePosixPath)


def test_what_is_not_equal_to_itself_comes_back_too():
    assert math.isnan(there_and_back({"a": [float("nan")]})["a"][0])
    assert numpy.isnan(there_and_back(numpy.float32("nan")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_tensors_are_data(dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    found = there_and_back({"deep": [tensor, torch.tensor(1).to(dtype), torch.zeros(0, 3).to(dtype)]})["deep"]
    assert torch.equal(found[0], tensor) and found[0].dtype == dtype
    assert found[1].shape == () and found[2].shape == (0, 3)


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "u2", "?", "i1"])
def test_arrays_are_data(dtype):
    array = numpy.arange(6).reshape(2, 3).astype(dtype)
    found = there_and_back(array)
    assert (found == array).all() and found.shape == (2, 3) and found.dtype == array.dtype.newbyteorder("=")


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)},
        {"a": [torch.ones(2)], "a[0]": torch.zeros(2)},
        {"k" * 5000 + "1": torch.ones(2), "k" * 5000 + "2": torch.zeros(2)},
    ],
    ids=["keys", "places", "long"],
)
def test_arrays_whose_paths_read_the_same_are_all_kept(value):
    encoder = Encoder("client_state")
    found = decode(encoder.encode(value), encoder.tensors.__getitem__)
    assert str(found) == str(value)
    assert all(len(name) <= 4096 for name in encoder.tensors)


class Color(Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, {"b": object()}]}, "client_state.a[1].b is a builtins.object"),
        ({"f": len}, "client_state.f is a builtins.builtin_function_or_method"),
        ({"e": Color.RED}, "client_state.e is a"),
        ({"d": defaultdict(int)}, "client_state.d is a collections.defaultdict"),
        ({("a", 1): object()}, "client_state[('a', 1)] is a builtins.object"),
        ({"n": numpy.array(["text"])}, "client_state.n is a numpy.ndarray"),
        ({"s": torch.zeros(2).to_sparse()}, "client_state.s is a Tensor"),
        ({"m": numpy.ma.array([1, 2], mask=[0, 1])}, "client_state.m is a numpy.ma.MaskedArray"),
        ({"l": numpy.longdouble(1)}, "client_state.l is a numpy.longdouble"),
        ({"l": numpy.zeros(2, numpy.longdouble)}, "client_state.l is a numpy.ndarray"),
        ({"w": PureWindowsPath("c:/x")}, "client_state.w is a pathlib"),
        ({"i": 1 << 14_000}, "client_state.i is an integer of 14001 bits"),
        ({1 << 14_000: 1}, "client_state (a key) is an integer of 14001 bits"),
        ({"d": torch.zeros((1,) * 65)}, "client_state.d has 65 dimensions; a checkpoint keeps at most 64"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_kept_is_refused_by_path_and_type(value, said):
    with pytest.raises(UsageError) as error:
        there_and_back(value)
    assert said in str(error.value)


def test_a_value_that_contains_itself():
    value = []
    value.append(value)
    with pytest.raises(UsageError, match="contains itself"):
        there_and_back(value)


@pytest.mark.parametrize(
    "value",
    [{"$unknown": 1}, {"$numpy": ["O", 1]}, {"$numpy": 3}, {"$bytes": "%"}, {"$datetime": "x"}, {"$tensor": "gone"},
     {"$timedelta": ["x"]}, {"$dict": [1]}, {"$complex": [1]}, {"$device": "nowhere:x"}, {"$set": [[1]]}],
    ids=str,
)  # fmt: skip
def test_what_nobody_has_encoded_is_our_error(value):
    with pytest.raises(CheckpointError):
        decode(value, {}.__getitem__)


def test_pickle_is_asked_for_twice():
    encoder = Encoder("client_state", allow_pickle=True)
    found = encoder.encode({"kind": complex})
    with pytest.raises(CheckpointError, match="pickled_client_state"):
        decode(found, {}.__getitem__)
    assert decode(found, {}.__getitem__, allow_pickle=True) == {"kind": complex}


def test_packed_values():
    value = {"state": torch.get_rng_state(), "more": (1, 2.5, None), "numpy": numpy.random.get_state(legacy=False)}
    found = unpack(pack(value))
    assert torch.equal(found["state"], value["state"]) and found["more"] == value["more"]
    assert (found["numpy"]["state"]["key"] == value["numpy"]["state"]["key"]).all()
    with pytest.raises(CheckpointError):
        unpack(torch.frombuffer(bytearray(b"no json"), dtype=torch.uint8))


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
values = st.recursive(
    plain, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner), max_leaves=12
)


@given(values)
def test_any_plain_value(value):
    assert there_and_back(value) == value


def doubled(times):
    value = [0]
    for _ in range(times):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "value",
    [doubled(200 - 5), {"a": doubled(60)}, [[0] * 1000] * 2000, ["x" * 1_000_000] * 30, [b"x" * 1_000_000] * 30],
    ids=["lists", "in a dict", "one list", "text", "bytes"],
)
def test_what_would_be_endless_without_sharing_is_refused(value):
    with pytest.raises(UsageError, match=r"client_state.* values in it are shared: written out"):
        Encoder("client_state").encode({"v": value})


def test_what_is_shared_a_little_is_written_again():
    row = {"lr": 0.1, "betas": (0.9, 0.99), "name": "a name of some length"}
    assert there_and_back([row] * 1000) == [row] * 1000


def test_an_array_that_is_there_often_is_one_array():
    array, tensor = numpy.arange(3), torch.ones(2)
    encoder = Encoder("client_state")
    body = encoder.encode({"a": [array] * 8000, "t": [tensor] * 8000, "other": torch.ones(2)})
    assert len(encoder.tensors) == 3
    reads = []
    found = decode(body, lambda name: reads.append(name) or encoder.tensors[name])
    assert len(reads) == 3 and found["a"][0] is not None
    assert len({id(each) for each in found["t"]}) == 1 and found["t"][0] is not found["other"]


@pytest.mark.parametrize("word", ["set", "frozenset", "dict", "ordered", "counter"])
def test_keys_that_have_one_hash_are_refused(word):
    keys = [number * (2**61 - 1) for number in range(200)]
    rows = keys if word.endswith("set") else [[key, 1] for key in keys]
    with pytest.raises(CheckpointError, match="200 keys of one dict or set have the same hash"):
        decode({f"${word}": rows}, lambda name: torch.zeros(1))
    assert len(decode({f"${word}": rows[:100]}, lambda name: torch.zeros(1))) == 100
