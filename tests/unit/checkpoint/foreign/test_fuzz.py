"""Random damage to what is read first: pickles, tables, indices. Whatever comes, it is our error or a value."""

import io
import json
import random
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from mizzen.checkpoint import foreign
from mizzen.errors import CheckpointError

HERE = Path(__file__).parents[3] / "fixtures" / "deepspeed"


def damaged(data, chance):
    """A few bytes changed, removed, doubled or moved."""
    data = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data))
        match chance.randrange(5):
            case 0:
                data[at] = chance.randrange(256)
            case 1:
                del data[at : at + chance.randint(1, 8)]
            case 2:
                data[at:at] = data[at : at + chance.randint(1, 40)]
            case 3:
                data[at] ^= 1 << chance.randrange(8)
            case 4:
                other = chance.randrange(len(data))
                data[at : at + 8] = data[other : other + 8]
        if not data:
            return b"\0"
    return bytes(data)


def damaged_zip(content, chance):
    """A file of torch's with another pickle, whose checksum is right."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, damaged(data, chance) if name.endswith("data.pkl") else data)
    return buffer.getvalue()


def use(path):
    source = foreign.open(path)
    for entry in source.names():
        tensor = source.read(entry)
        assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype)
    source.facts()


def tries(folder, path, damage, count, seed):
    """Damage one file again and again; how often it was refused."""
    chance, original, refused = random.Random(seed), path.read_bytes(), 0
    for _ in range(count):
        path.write_bytes(damage(original, chance))
        try:
            use(folder)
        except CheckpointError as error:
            refused += 1
            assert len(str(error)) < 3000
    return refused


@pytest.mark.parametrize("case", ["zero0", "zero2", "zero3", "moe", "pipeline", "universal2"])
def test_deepspeed(tmp_path, case):
    folder = Path(shutil.copytree(HERE / case, tmp_path / case))
    refused = 0
    for number, path in enumerate(sorted(folder.rglob("*.pt"))[:4]):
        original = path.read_bytes()
        refused += tries(folder, path, damaged_zip, 15, f"{case} {number}")
        path.write_bytes(original)
    assert refused > 10


def test_dcp(tmp_path):
    state = {"model": {"a": torch.ones(3, 2), "b": torch.ones(2)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert tries(tmp_path / "saved", tmp_path / "saved" / ".metadata", damaged, 150, "dcp") > 50


def test_safetensors(tmp_path):
    save_file({"a": torch.ones(3, 2), "b": torch.arange(4)}, tmp_path / "model.safetensors", {"k": "v"})
    assert tries(tmp_path, tmp_path / "model.safetensors", damaged, 150, "safetensors") > 50


def test_index(tmp_path):
    save_file({"a": torch.ones(3, 2)}, tmp_path / "part.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 24}, "weight_map": {"a": "part.safetensors"}}))
    assert tries(tmp_path, path, damaged, 150, "index") > 50


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_state_dicts(tmp_path, new):
    state = {"model": {"a": torch.ones(3, 2)}, "more": [{1, 2}, (3.5, None), b"x", 2**70]}
    torch.save(state, tmp_path / "file.pt", _use_new_zipfile_serialization=new)
    path = tmp_path / "file.pt"
    assert tries(path, path, damaged_zip if new else damaged, 200, f"state {new}") > 50
    if new:
        torch.save(state, path)
        assert tries(path, path, damaged, 200, "whole zip") > 20
