"""Files of torch.save: the same values as torch.load gives, and a plain error for what is not one."""

import io
import struct
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mizzen.checkpoint.foreign import torch_file
from mizzen.checkpoint.foreign.extent import Extent
from mizzen.checkpoint.foreign.values import plain
from mizzen.errors import CheckpointError
from unit.checkpoint.foreign.malice import stream, tensor, text

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool),
    *(torch.complex64, torch.complex128),
)


@pytest.fixture
def load(tmp_path):
    """Save with torch, read with ours."""

    def run(value, **arguments):
        torch.save(value, tmp_path / "file.pt", **arguments)
        return plain(torch_file.load(Extent.of_file(tmp_path / "file.pt")))

    return run


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left.detach(), right.detach())


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_dtypes(load, new):
    tensors = {str(dtype): torch.arange(5).to(dtype) for dtype in DTYPES}
    if not new:  # the older format has no storage class for these
        tensors = {name: tensor for name, tensor in tensors.items() if "8_e" not in name and "uint16" not in name}
        tensors.pop("torch.uint32")
    found = load(tensors, _use_new_zipfile_serialization=new)
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert found[name].view(torch.uint8).tolist() == value.view(torch.uint8).tolist()


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_views_parameters_and_empty_tensors(load, new):
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "base": base,
        "turned": base.t(),
        "part": base[1:3, 2:5],
        "steps": base[::2, ::3],
        "number": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(base[2]),
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "attributed": torch.nn.Parameter(torch.ones(2)),
    }
    tensors["attributed"].note = "kept by torch, left out here"
    found = load(tensors, _use_new_zipfile_serialization=new)
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data(load, protocol):
    value = {
        "ordered": OrderedDict(a=1, b=[2.5, None, True]),
        "default": defaultdict(list, {"x": [1]}),
        "counted": Counter("aab"),
        "set": {1, 2},
        "frozen": frozenset({"a"}),
        "bytes": b"\x00\xff",
        "array": bytearray(b"ab"),
        "complex": 1 + 2j,
        "large": 2**100,
        "negative": -5,
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "scalar": np.float32(1.5),
        "numbers": np.arange(6, dtype=np.int16).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        3: ("int", (1, 2)),
        None: "none",
        (1, "a"): "pair",
    }
    found = load(value, pickle_protocol=protocol)
    for key in ("numbers", "fortran"):
        np.testing.assert_array_equal(found.pop(key), value.pop(key))
    assert found.pop("device") == "cuda:1"
    value.pop("device")
    assert found == value


def test_namespaces_become_dicts(load):
    found = load({"arguments": Namespace(lr=0.1), "simple": SimpleNamespace(a=[1])})
    assert found["arguments"] == {"class": "argparse.Namespace", "state": {"lr": 0.1}}
    assert found["simple"] == {"class": "types.SimpleNamespace", "state": {"a": [1]}}


def test_shared_tensors_share_their_bytes(tmp_path):
    weight = torch.ones(3)
    torch.save({"a": weight, "b": weight[1:]}, tmp_path / "file.pt")
    tree = torch_file.load(Extent.of_file(tmp_path / "file.pt"))
    assert tree["a"].storage is tree["b"].storage


def test_a_range_is_read_without_the_rest(tmp_path):
    torch.save(torch.arange(100.0), tmp_path / "file.pt")
    ref = torch_file.load(Extent.of_file(tmp_path / "file.pt"))
    assert ref.elements(40, 3).tolist() == [40, 41, 42]
    with pytest.raises(CheckpointError, match="elements 99 to 101 were asked for"):
        ref.elements(99, 2)


def test_files_without_checksums_are_read(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, tmp_path / "file.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert plain(torch_file.load(Extent.of_file(tmp_path / "file.pt")))["a"].tolist() == [1, 1, 1]


def repack(source, target, change, compress=zipfile.ZIP_STORED):
    """Write a zip file anew, with its members changed: (name, data) -> some (name, data)."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compress) as new:
        for name in old.namelist():
            for pair in change(name, old.read(name)):
                new.writestr(*pair)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda n, d: [] if n.endswith("data/0") else [(n, d)], "there is no storage '0'"),
        (lambda n, d: [(n, d[:4] if n.endswith("data/0") else d)], "should have 3 of torch.float32; it has 4 bytes"),
        (
            lambda n, d: [(n, d)] + [("../../evil", b"x")] * n.endswith("data.pkl"),
            "named '../../evil', which leads out",
        ),
        (lambda n, d: [(n, d)] + [("/etc/evil", b"x")] * n.endswith("data.pkl"), "named '/etc/evil', which leads out"),
        (lambda n, d: [(n, d)] + [("b/data.pkl", d)] * n.endswith("data.pkl"), "2 members named data.pkl"),
        (lambda n, d: [(n, d)] + [("file/constants.pkl", d)] * n.endswith("data.pkl"), "a TorchScript program"),
        (lambda n, d: [(n, b"big" if n.endswith("byteorder") else d)], "big-endian"),
        (lambda n, d: [(n, b"" if n.endswith("data.pkl") else d)], "at byte 0: it has no end"),
    ],
)
def test_zip_files_that_are_not_torchs(tmp_path, change, words):
    torch.save({"a": torch.ones(3)}, tmp_path / "file.pt")
    repack(tmp_path / "file.pt", tmp_path / "spoilt.pt", change)
    with pytest.raises(CheckpointError, match=words):
        torch_file.load(Extent.of_file(tmp_path / "spoilt.pt"))


def test_two_members_of_one_name(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "file.pt")
    with pytest.warns(UserWarning, match="Duplicate name"):
        repack(tmp_path / "file.pt", tmp_path / "spoilt.pt", lambda n, d: [(n, d)] * (1 + n.endswith("data/0")))
    with pytest.raises(CheckpointError, match="two members named 'file/data/0'"):
        torch_file.load(Extent.of_file(tmp_path / "spoilt.pt"))


def test_a_table_of_contents_beyond_measure_is_not_read(tmp_path, monkeypatch):
    torch.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "file.pt")
    monkeypatch.setattr(torch_file, "TABLE", 300)
    with pytest.raises(CheckpointError, match="its table of contents has [0-9]+ bytes; at most 300 are read"):
        torch_file.load(Extent.of_file(tmp_path / "file.pt"))


def test_names_in_any_alphabet(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "été-模型.pt")
    assert torch_file.load(Extent.of_file(tmp_path / "été-模型.pt"))["a"].read().tolist() == [1.0] * 3


def test_a_zip_bomb_is_not_unpacked(tmp_path):
    torch.save({"a": torch.zeros(10_000_000)}, tmp_path / "file.pt")
    repack(tmp_path / "file.pt", tmp_path / "bomb.pt", lambda n, d: [(n, d)], zipfile.ZIP_DEFLATED)
    assert (tmp_path / "bomb.pt").stat().st_size < 100_000
    with pytest.raises(CheckpointError, match="is compressed or encrypted, which torch never does"):
        torch_file.load(Extent.of_file(tmp_path / "bomb.pt"))


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\x03\x04" + b"\0" * 50, b"hello world", b"\x80\x02.", b"\x80"])
def test_other_files(tmp_path, content):
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="file.pt"):
        torch_file.load(Extent.of_file(tmp_path / "file.pt"))


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_truncated_anywhere(tmp_path, new):
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(50.0), "b": [torch.ones(3)]}, buffer, _use_new_zipfile_serialization=new)
    whole = buffer.getvalue()
    for length in range(0, len(whole), 7):
        (tmp_path / "file.pt").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="file.pt"):
            torch_file.load(Extent.of_file(tmp_path / "file.pt"))


def test_members_beyond_four_gigabytes(tmp_path):
    """A zip file of 5 GiB, nearly all of it a hole, with the 64-bit records that torch writes for such files."""
    large, numel = 5 * 2**30, 5 * 2**28
    data = stream(b"}" + text("a") + tensor([numel], [1], numel=numel) + b"s")
    members, table = [(b"archive/data.pkl", data, len(data)), (b"archive/data/0", b"", large)], b""
    with (tmp_path / "file.pt").open("wb") as file:
        for name, content, length in members:
            start, cut = file.tell(), min(length, 0xFFFFFFFF)
            file.write(
                struct.pack("<4s5H3I2H", b"PK\x03\x04", 45, 0, 0, 0, 0, 0, cut, cut, len(name), 0) + name + content
            )
            file.seek(start + 30 + len(name) + length)
            extra = struct.pack("<HHQQ", 1, 16, length, length) if length > cut else b""
            head = (b"PK\x01\x02", 45, 45, 0, 0, 0, 0, 0, cut, cut, len(name), len(extra), 0, 0, 0, 0, start)
            table += struct.pack("<4s6H3I5H2I", *head) + name + extra
        file.seek(-4, 1)
        file.write(struct.pack("<f", 2.5))
        start = file.tell()
        file.write(table + struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 2, 2, len(table), start))
        file.write(struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(table), 1))
        file.write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))
    ref = torch_file.load(Extent.of_file(tmp_path / "file.pt"))["a"]
    assert ref.shape == (numel,)
    assert ref.elements(numel - 2, 2).tolist() == [0, 2.5]
    (tmp_path / "file.pt").unlink()


def test_what_is_no_regular_file(tmp_path):
    with pytest.raises(CheckpointError, match="not a regular file"):
        Extent.of_file(tmp_path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    torch.save(torch.arange(1000.0), tmp_path / "file.pt")
    ref = torch_file.load(Extent.of_file(tmp_path / "file.pt"))
    (tmp_path / "file.pt").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="ends after"):
        ref.read()
