"""The calls that DeepSpeed's users know, on DeepSpeed's folders and on others."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mizzen.checkpoint import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from mizzen.checkpoint.convert import convert, fp32_weights, size_of, write_weights
from mizzen.checkpoint.open import open_source
from mizzen.errors import CheckpointError, UsageError

HERE = Path(__file__).parents[2] / "fixtures" / "deepspeed"
FROZEN = {"adapted.base.weight", "adapted.base.bias"}
PLAIN = ("zero0", "half0", "zero1", "zero2", "zero3", "bf16", "elastic", "universal2", "universal3")


def expected(case):
    """Masters where there are some, the model's values otherwise, in fp32, under every name."""
    told = load_file(HERE / f"{case.replace('universal', 'zero')}.safetensors")
    weights = {key.partition("/")[2]: value for key, value in told.items() if key.startswith("model/")}
    weights |= {key.partition("/")[2]: value for key, value in told.items() if key.startswith("master/")}
    if "embed.weight" in weights and not case.startswith("moe"):
        weights["head.weight"] = weights["embed.weight"]
    return {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


class Tiny(torch.nn.Module):
    """The shapes of the fixture's model."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.adapted = torch.nn.Module()
        self.adapted.base = torch.nn.Linear(5, 5)
        self.adapted.lora_A = torch.nn.Parameter(torch.zeros(2, 5))
        self.adapted.lora_B = torch.nn.Parameter(torch.zeros(5, 2))
        self.norm = torch.nn.LayerNorm(5)
        self.register_buffer("scale", torch.zeros(5))
        self.register_buffer("seen", torch.tensor(0))
        self.head = torch.nn.Linear(5, 7)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("case", [*PLAIN, "pipeline", "moe", "moe4"])
def test_the_state_dict(case):
    assert_same(get_fp32_state_dict_from_zero_checkpoint(HERE / case), expected(case))


@pytest.mark.parametrize("case", PLAIN)
def test_a_tied_weight_is_one_tensor(case):
    found = get_fp32_state_dict_from_zero_checkpoint(str(HERE / case), tag="step3")
    assert found["head.weight"] is found["embed.weight"]


@pytest.mark.parametrize("case", ["zero1", "zero2", "zero3", "universal3"])
def test_without_frozen_parameters(case):
    found = get_fp32_state_dict_from_zero_checkpoint(HERE / case, exclude_frozen_parameters=True)
    assert found.keys() == expected(case).keys() - FROZEN


def test_lazily():
    found = get_fp32_state_dict_from_zero_checkpoint(HERE / "zero3", lazy_mode=True)
    assert (found["embed.weight"].shape, found["embed.weight"].dtype) == ((7, 5), torch.float32)
    assert_same({name: value.contiguous() for name, value in found.items()}, expected("zero3"))


def test_files_of_torch(tmp_path):
    convert_zero_checkpoint_to_fp32_state_dict(HERE / "zero2", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["pytorch_model.bin"]
    assert_same(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True), expected("zero2"))
    assert_same(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "out"), expected("zero2"))


@pytest.mark.parametrize("safe", [True, False])
def test_shards_with_an_index(tmp_path, safe):
    convert_zero_checkpoint_to_fp32_state_dict(HERE / "zero3", tmp_path, max_shard_size=200, safe_serialization=safe)
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    index = json.loads((tmp_path / f"{stem}.{suffix}.index.json").read_text())
    wanted = expected("zero3")
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"{stem}-00001-of-{len(files):05d}.{suffix}"
    found = {}
    for name in files:
        part = load_file(tmp_path / name) if safe else torch.load(tmp_path / name, weights_only=True)
        assert len(part) == 1 or sum(value.nbytes for value in part.values()) <= 200
        found |= part
    assert_same(found, wanted)
    assert_same(get_fp32_state_dict_from_zero_checkpoint(tmp_path), wanted)


@pytest.mark.parametrize("safe", [True, False])
def test_a_file_is_replaced_by_a_whole_one(tmp_path, safe):
    path = tmp_path / ("model.safetensors" if safe else "pytorch_model.bin")
    path.write_text("older")
    source = open_source(HERE / "zero2")
    found = fp32_weights(source)
    last = list(found)[-1]
    broken = found | {last: replace(found[last], read=lambda: 1 / 0)}
    with pytest.raises(ZeroDivisionError):
        write_weights(tmp_path, broken, shard=None, safe=safe)
    assert (path.read_text(), len(list(tmp_path.iterdir()))) == ("older", 1)
    write_weights(tmp_path, found, shard=None, safe=safe)
    assert_same(load_file(path) if safe else torch.load(path, weights_only=True), expected("zero2"))
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_into_a_model(caplog):
    model = Tiny()
    with caplog.at_level(logging.WARNING, "mizzen"):
        assert load_state_dict_from_zero_checkpoint(model, HERE / "zero3") is model
    assert_same(model.state_dict(), expected("zero3"))
    assert caplog.text == ""


def test_into_a_model_with_other_names(caplog):
    model = Tiny()
    model.extra = torch.nn.Parameter(torch.zeros(1))
    del model.norm
    with caplog.at_level(logging.WARNING, "mizzen"):
        load_state_dict_from_zero_checkpoint(model, HERE / "zero2")
    assert "1 names of the model are not in the checkpoint: extra" in caplog.text
    assert "2 names of the checkpoint are not in the model: norm.weight, norm.bias" in caplog.text


def test_into_another_model():
    with pytest.raises(CheckpointError, match="made for another model: no name is in both; it has "):
        load_state_dict_from_zero_checkpoint(torch.nn.Linear(2, 2), HERE / "zero2")
    model = Tiny()
    model.norm = torch.nn.LayerNorm(6)
    with pytest.raises(CheckpointError, match=r"norm.weight: \[6\] here, \[5\] there; norm.bias"):
        load_state_dict_from_zero_checkpoint(model, HERE / "zero2")


def test_a_source_of_another_kind(tmp_path):
    save_file({"a": torch.ones(2, dtype=torch.float16), "n": torch.tensor([1])}, tmp_path / "model.safetensors")
    wanted = {"a": torch.ones(2), "n": torch.tensor([1])}
    assert_same(get_fp32_state_dict_from_zero_checkpoint(tmp_path), wanted)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5e9), ("1.5 MiB", 1.5 * 2**20), ("100", 100), (7, 7), ("2kb", 2000)]
)
def test_sizes(text, size):
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1GB", "5IB", "0", 0, "0GB"])
def test_sizes_that_are_none(text):
    with pytest.raises(UsageError, match="is no size; write it as 5GB"):
        size_of(text)


@pytest.mark.parametrize("case", ["zero0", "zero1", "zero2", "zero3", "bf16", "universal3", "pipeline", "moe"])
def test_what_is_imported_is_the_same(case, tmp_path):
    source = open_source(HERE / case)
    convert(source, tmp_path, "imported")
    assert_same(get_fp32_state_dict_from_zero_checkpoint(tmp_path), expected(case))
    ours = open_source(tmp_path)
    states = {(entry.kind, entry.name) for entry in source.names()} - {("master", each) for each in expected(case)}
    assert {kind for kind, _ in states} == {entry.kind for entry in ours.names()}
    for entry in ours.names():
        if entry.kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.read(entry), source.read(entry)), entry
