"""Folders that torch.distributed.checkpoint wrote in one process; sharded ones are in tests/ranks."""

import pickle
import shutil

import pytest
import torch

from groups import Later
from mizzen.checkpoint import foreign
from mizzen.errors import CheckpointError

dcp = Later("torch.distributed.checkpoint")
state_dict = Later("torch.distributed.checkpoint.state_dict")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model and its optimizer after one step, and the folder they were saved to."""
    folder = tmp_path_factory.mktemp("dcp") / "step1"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 2)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    weights, states = state_dict.get_state_dict(model, optimizer)
    extra = {"step": 7, "note": ["kept", (1, 2)], "odd": torch.arange(3), "number": torch.tensor(4)}
    dcp.save({"model": weights, "optim": states, "extra": extra}, checkpoint_id=folder, no_dist=True)
    return folder, model, optimizer


def test_everything_is_found(saved):
    folder, model, optimizer = saved
    source = foreign.open(folder)
    found = {(entry.kind, entry.name): source.read(entry) for entry in source.names()}
    for name, parameter in model.named_parameters():
        assert torch.equal(found.pop(("model", name)), parameter)
        for kind, value in optimizer.state[parameter].items():
            assert torch.equal(found.pop((kind, name)), value)
    assert found == {}
    for entry in source.names():
        tensor = source.read(entry)
        assert (entry.shape, entry.dtype) == (tuple(tensor.shape), tensor.dtype)


def test_values_are_facts(saved):
    facts = foreign.open(saved[0]).facts()
    assert facts["format"] == "torch.distributed.checkpoint"
    assert facts["values"]["extra.step"] == 7
    assert torch.equal(facts["values"]["extra.odd"], torch.arange(3))
    assert torch.equal(facts["values"]["extra.number"], torch.tensor(4))
    assert facts["values"]["optim.param_groups.0.lr"] == 0.1


def test_flat_names_tell_states_from_weights(tmp_path):
    state = {"layer.state.weight": torch.ones(1), "optim.state.layer.weight.exp_avg": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path / "flat", no_dist=True)
    path = tmp_path / "flat" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = None
    path.write_bytes(pickle.dumps(metadata))
    source = foreign.open(tmp_path / "flat")
    assert {(entry.kind, entry.name) for entry in source.names()} == {
        ("model", "layer.state.weight"),
        ("exp_avg", "layer.weight"),
    }


def test_a_missing_or_truncated_file_is_named(saved, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved[0], folder)
    (data,) = folder.glob("*.distcp")
    whole = data.read_bytes()
    for sixteenth in range(16):
        data.write_bytes(whole[: len(whole) * sixteenth // 16])
        with pytest.raises(CheckpointError, match=data.name):
            foreign.open(folder)
    data.unlink()
    with pytest.raises(CheckpointError, match=f"{data.name}: cannot be opened"):
        foreign.open(folder)


def test_flipped_bits_in_the_data_are_found(saved, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved[0], folder)
    (data,) = folder.glob("*.distcp")
    whole = data.read_bytes()
    clean = {(entry.kind, entry.name): foreign.open(saved[0]).read(entry) for entry in foreign.open(saved[0]).names()}
    generator = torch.Generator().manual_seed(0)
    caught = 0
    for _ in range(20):
        spoilt = bytearray(whole)
        at = int(torch.randint(len(whole), (), generator=generator))
        spoilt[at] ^= 1 << int(torch.randint(8, (), generator=generator))
        data.write_bytes(bytes(spoilt))
        try:
            source = foreign.open(folder)
            assert all(torch.equal(source.read(entry), clean[entry.kind, entry.name]) for entry in source.names()), at
        except CheckpointError as error:
            assert data.name in str(error)
            caught += 1
    assert caught > 2


def test_truncated_metadata(saved, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved[0], folder)
    whole = (folder / ".metadata").read_bytes()
    for length in range(0, len(whole), 61):
        (folder / ".metadata").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=".metadata"):
            foreign.open(folder)
