"""Weights for others, one tensor at a time, and the fp32 functions that scripts know."""

import json
from dataclasses import replace

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mizzen.checkpoint import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from mizzen.checkpoint.convert import (
    convert,
    export_safetensors,
    export_torch,
    fp32_weights,
    lazy_weights,
    write_weights,
)
from mizzen.checkpoint.open import open_source
from mizzen.checkpoint.read import Reader, read_manifest
from mizzen.checkpoint.source import Entry
from mizzen.checkpoint.tagged_json import Encoder
from mizzen.errors import CheckpointError, UsageError


class Given:
    """A Source of plain tensors, which counts how many are alive at a time."""

    def __init__(self, tensors, facts=None):
        self.tensors = tensors
        self._facts = facts or {}

    def names(self):
        return [Entry(kind, name, tuple(t.shape), t.dtype) for (kind, name), t in self.tensors.items()]

    def read(self, entry):
        return self.tensors[entry.kind, entry.name].clone()

    def facts(self):
        return self._facts


MODEL = {
    ("model", "layers.10.weight"): torch.randn(4, 3).bfloat16(),
    ("master", "layers.10.weight"): torch.randn(4, 3),
    ("model", "layers.2.weight"): torch.randn(4, 3),
    ("model", "steps"): torch.tensor(5),
    ("model", "empty"): torch.zeros(0, 2),
    ("exp_avg", "layers.10.weight"): torch.randn(4, 3),
    ("step", "layers.10.weight"): torch.tensor(7.0),
}
FACTS = {
    "global_steps": 7,
    "client_state": {"epoch": (1, 2)},
    "aliases": {"head": "layers.2.weight"},
    "frozen": ["steps"],
}


@pytest.fixture
def folder(tmp_path):
    convert(Given(MODEL, FACTS), tmp_path / "checkpoints", "imported")
    return tmp_path / "checkpoints"


def test_a_source_becomes_a_checkpoint(folder):
    source = open_source(folder)
    assert source.facts()["client_state"] == {"epoch": (1, 2)}
    with Reader(folder / "imported") as reader:
        assert reader.manifest.step == 7
        assert torch.equal(reader.whole("model", "layers.10.weight"), MODEL["master", "layers.10.weight"])
        assert torch.equal(reader.whole("exp_avg", "layers.10.weight"), MODEL["exp_avg", "layers.10.weight"])
        assert reader.find("master", "layers.10.weight") is None


def test_a_source_that_does_not_keep_its_word(tmp_path):
    given = Given({("model", "a"): torch.zeros(3)})
    given.read = lambda entry: torch.zeros(4)
    with pytest.raises(CheckpointError, match="was announced as"):
        convert(given, tmp_path, "imported")
    assert list(tmp_path.iterdir()) == []


def test_facts_that_nobody_has_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"counters\.global_steps is a float"):
        convert(Given(MODEL, {"counters": {"global_steps": float("inf")}}), tmp_path, "imported")
    with pytest.raises(CheckpointError, match="'frozen' is no list of names"):
        fp32_weights(Given(MODEL, {"frozen": [[1]]}), frozen=False)


def test_shards_with_an_index(folder, tmp_path):
    paths = export_safetensors(open_source(folder), tmp_path / "out", precision="fp32", shard=60)
    assert [path.name for path in paths] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    ]  # fmt: skip
    index = json.loads(paths[-1].read_text())
    found = {}
    for name, home in index["weight_map"].items():
        found[name] = load_file(tmp_path / "out" / home)[name]
    assert torch.equal(found["layers.10.weight"], MODEL["master", "layers.10.weight"])
    assert found["steps"].item() == 5 and set(found) == {"layers.10.weight", "layers.2.weight", "steps", "empty"}
    assert index["metadata"]["total_size"] == 2 * 48 + 8


@pytest.mark.parametrize("safe", [True, False])
def test_weights_of_an_earlier_export_go(folder, tmp_path, safe):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")

    def names_with(shard):
        convert_zero_checkpoint_to_fp32_state_dict(folder, out, max_shard_size=shard, safe_serialization=safe)
        return sorted(path.name for path in out.iterdir())

    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    shards = [f"{stem}-0000{number}-of-00003.{suffix}" for number in (1, 2, 3)]
    assert names_with("5GB") == ["config.json", f"{stem}.{suffix}"]
    assert names_with(60) == ["config.json", *shards, f"{stem}.{suffix}.index.json"]
    assert names_with("5GB") == ["config.json", f"{stem}.{suffix}"]


def test_weights_that_are_read_stay(folder, tmp_path):
    out = tmp_path / "out"
    shards = export_safetensors(open_source(folder), out, precision="fp32", shard=60)
    export_safetensors(open_source(out), out, precision="bf16")
    assert all(path.exists() for path in shards) and (out / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_one_file_in_a_precision(folder, tmp_path, precision, dtype):
    (path,) = export_safetensors(open_source(folder), tmp_path / "out", precision=precision)
    found = load_file(path)
    assert found["layers.2.weight"].dtype == dtype and found["steps"].dtype == torch.int64
    whole = torch.load(export_torch(open_source(folder), tmp_path / "m.bin", precision=precision), weights_only=True)
    assert torch.equal(whole["layers.2.weight"], found["layers.2.weight"]) and torch.equal(
        whole["head"], whole["layers.2.weight"]
    )
    assert sorted(item.name for item in tmp_path.iterdir()) == ["checkpoints", "m.bin", "out"]


def test_fp32_state_dicts(folder, tmp_path):
    found = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert (
        torch.equal(found["layers.10.weight"], MODEL["master", "layers.10.weight"])
        and found["head"] is found["layers.2.weight"]
    )
    late = get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    assert late["layers.2.weight"].shape == (4, 3) and torch.equal(late["head"].contiguous(), found["head"])
    assert "steps" not in get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "a", safe_serialization=True)
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").exists() and (tmp_path / "b" / "pytorch_model.bin").exists()


def test_a_model_takes_them(tmp_path):
    convert(Given({("model", "weight"): torch.ones(2, 3), ("model", "bias"): torch.zeros(2)}), tmp_path, "x")
    model = load_state_dict_from_zero_checkpoint(nn.Linear(3, 2), tmp_path)
    assert torch.equal(model.weight, torch.ones(2, 3))


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint that is known. Looked for manifest.json"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)


def test_many_tensors_are_one_map(folder, tmp_path, monkeypatch):
    """The system lets a process map some 65,000 times."""
    maps = []
    mapped = numpy.memmap
    monkeypatch.setattr(numpy, "memmap", lambda *given, **options: maps.append(given) or mapped(*given, **options))
    many = {("model", f"empty{number}"): torch.zeros(0) for number in range(2)} | MODEL
    export_torch(Given(many, FACTS), tmp_path / "m.pt", precision="saved")
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert len(maps) == 1 and found["empty"].shape == (0, 2) and found["empty1"].shape == (0,)
    assert torch.equal(found["layers.10.weight"], MODEL["master", "layers.10.weight"]) and found["steps"].item() == 5


def test_shards_that_are_still_read_are_not_replaced(tmp_path):
    tensors = {("model", name): torch.full((4, 3), value) for name, value in (("b", 1.0), ("a", 2.0))}
    write_weights(tmp_path, lazy_weights(Given(tensors), "saved"), shard=60, safe=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 3
    with pytest.raises(UsageError, match="would be replaced while weights are still read from it"):
        export_safetensors(open_source(tmp_path), tmp_path, precision="saved", shard=60)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_empty_tensor_among_the_facts(tmp_path):
    convert(Given(MODEL, FACTS | {"client_state": {"history": torch.zeros(0), "seen": torch.ones(2)}}), tmp_path, "x")
    found = open_source(tmp_path).facts()["client_state"]
    assert found["history"].shape == (0,) and found["seen"].tolist() == [1, 1]


def test_a_dtype_that_the_format_has_not_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="model 'wide' is torch.complex128, which a checkpoint cannot hold"):
        convert(Given({("model", "wide"): torch.zeros(2, dtype=torch.complex128)}), tmp_path, "x")
    assert list(tmp_path.iterdir()) == []


def test_a_tag_of_others_need_not_be_plain(tmp_path):
    torch.save({"weight": torch.ones(2)}, make(tmp_path / "epoch=3") / "pytorch_model.bin")
    assert get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag="epoch=3")["weight"].tolist() == [1, 1]


def make(path):
    path.mkdir()
    return path


def test_a_pickled_client_state_is_no_obstacle_to_weights(folder, tmp_path):
    manifest = read_manifest(folder / "imported")
    pickled = replace(manifest, facts={**manifest.facts, "client": Encoder("c", allow_pickle=True).encode({"a": len})})
    (folder / "imported" / "manifest.json").write_bytes(pickled.to_bytes())
    found = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert torch.equal(found["head"], MODEL["model", "layers.2.weight"])
    with pytest.raises(CheckpointError, match="pickled_client_state"):
        open_source(folder).facts()["client_state"]
