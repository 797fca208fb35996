"""Plain weights: files and folders of safetensors and of torch, with and without an index."""

import json

import pytest
import torch
from safetensors.torch import save_file

from mizzen.checkpoint import foreign
from mizzen.errors import CheckpointError

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(4, dtype=torch.int64),
    "c": torch.ones(2, dtype=torch.bfloat16),
    "d": torch.tensor(True),
    "empty": torch.empty(0, 2),
}


def contents(source):
    return {entry.name: source.read(entry) for entry in source.names() if entry.kind == "model"}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors", "adapter_model.safetensors"])
def test_one_file_of_safetensors(tmp_path, name):
    save_file(TENSORS, tmp_path / name, {"format": "pt"})
    for path in (tmp_path, tmp_path / name):
        source = foreign.open(path)
        assert_same(contents(source), TENSORS)
        assert source.facts() == {"format": "safetensors", "metadata": {"format": "pt"}, "left_out": []}


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_several_files_with_an_index(tmp_path, suffix):
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    owners = {}
    for number, names in enumerate((["a", "b"], ["c", "d", "empty"])):
        file = f"{stem}-{number}.{suffix}"
        part = {name: TENSORS[name] for name in names}
        save_file(part, tmp_path / file) if suffix == "safetensors" else torch.save(part, tmp_path / file)
        owners |= dict.fromkeys(names, file)
    index = tmp_path / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": owners}))
    source = foreign.open(tmp_path)
    assert_same(contents(source), TENSORS)
    assert source.facts()["files"] == [f"{stem}-0.{suffix}", f"{stem}-1.{suffix}"]
    index.write_text(json.dumps({"weight_map": owners | {"z": f"{stem}-0.{suffix}"}}))
    with pytest.raises(CheckpointError, match=f"'z' should be in '{stem}-0.{suffix}', and is not"):
        foreign.open(tmp_path)
    (tmp_path / f"{stem}-1.{suffix}").unlink()
    with pytest.raises(CheckpointError, match=f"{stem}-1.{suffix}: cannot be opened"):
        foreign.open(tmp_path)


def test_truncated_safetensors(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="model.safetensors"):
            foreign.open(tmp_path)


def test_a_hub_cache_links_to_its_own_blobs_only(tmp_path):
    folder = tmp_path / "models--a--b" / "snapshots" / "1234"
    blobs = tmp_path / "models--a--b" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    save_file(TENSORS, blobs / "abc")
    (folder / "model.safetensors").symlink_to("../../blobs/abc")
    assert_same(contents(foreign.open(folder)), TENSORS)
    save_file(TENSORS, tmp_path / "outside")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../../outside")
    with pytest.raises(CheckpointError, match="which is outside of"):
        foreign.open(folder)


def trained(groups):
    """A model after two steps, and its optimizer; `groups` cuts its parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(groups(model), lr=0.1)
    for _ in range(2):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "groups",
    [
        lambda model: model.parameters(),
        lambda model: [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() == 1]},
        ],
        lambda model: [*reversed([*model.named_parameters()])],
    ],
    ids=["one group", "two groups", "named"],
)
@pytest.mark.parametrize("keys", [("model", "optimizer"), ("state_dict", "optimizer_states")])
def test_a_state_dict_with_its_optimizer(tmp_path, groups, keys):
    model, optimizer = trained(groups)
    state = optimizer.state_dict()
    saved = {keys[0]: model.state_dict(), keys[1]: [state] if keys[1].endswith("s") else state, "epoch": 3}
    torch.save(saved, tmp_path / "checkpoint.pt")
    source = foreign.open(tmp_path / "checkpoint.pt")
    assert_same(contents(source), model.state_dict())
    found = {(entry.kind, entry.name): source.read(entry) for entry in source.names() if entry.kind != "model"}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state[parameter].items():
            assert torch.equal(found.pop((kind, name)), value)
    assert found == {}
    facts = source.facts()
    assert facts["client_state"]["epoch"] == 3
    assert facts["left_out"] == []


def test_numbers_that_may_mean_two_things_are_left_out(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.Adam(model[1].parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    source = foreign.open(tmp_path / "checkpoint.pt")
    assert {entry.kind for entry in source.names()} == {"model"}
    (sentence,) = source.facts()["left_out"]
    assert sentence == (
        "optimizer states: they are numbered, and the shapes do not say which parameter each number means"
    )


def test_tied_weights_are_one_parameter_to_the_optimizer(tmp_path):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3, bias=False), "b": torch.nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    optimizer = torch.optim.Adam(model.parameters())
    model["b"](torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    source = foreign.open(tmp_path / "checkpoint.pt")
    assert [entry.name for entry in source.names() if entry.kind == "exp_avg"] == ["a.weight"]


def test_files_without_weights(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="has no tensors at its top and none under model, module"):
        foreign.open(tmp_path / "file.pt")
    torch.save([torch.ones(2)], tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="a dict was expected, not list"):
        foreign.open(tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="is a file, so it has no tag 'x'"):
        foreign.open(tmp_path / "file.pt", "x")


def test_reading_what_is_not_there(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = foreign.open(tmp_path)
    (entry, *_) = source.names()
    other = type(entry)("exp_avg", entry.name, entry.shape, entry.dtype)
    with pytest.raises(CheckpointError, match=f"has no exp_avg of '{entry.name}'"):
        source.read(other)
