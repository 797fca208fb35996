"""A pipeline's weights as DeepSpeed's files of layers, and back."""

from pathlib import Path

import pytest
import torch
from torch import nn

import mizzen
from mizzen import pipe
from mizzen.checkpoint import foreign
from mizzen.checkpoint.convert import convert
from mizzen.checkpoint.layer_files import export_layers
from mizzen.checkpoint.open import open_source, weights_of
from mizzen.checkpoint.source import Entry
from mizzen.errors import CheckpointError

FIXTURE = Path(__file__).parents[2] / "fixtures" / "deepspeed" / "pipeline"


def test_what_deepspeed_wrote_comes_out_again_file_by_file(tmp_path):
    convert(open_source(FIXTURE), tmp_path / "ours", "imported")
    written = export_layers(open_source(tmp_path / "ours"), tmp_path / "theirs", precision="saved")
    place = tmp_path / "theirs" / "global_step3"
    assert (tmp_path / "theirs" / "latest").read_text() == "global_step3"
    originals = {path.name: path for path in (FIXTURE / "step3").glob("layer_*")}
    names = {path.name for path in written if path.parent == place}
    assert names == {*originals, "mp_rank_00_model_states.pt"}
    for name, path in originals.items():
        found, expected = torch.load(place / name), torch.load(path)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key].to(value.dtype), value), (name, key)
    head = torch.load(place / "mp_rank_00_model_states.pt", weights_only=False)
    assert (head["global_steps"], head["global_samples"], head["epoch"], head["module"]) == (3, 6, 4, None)


class Scaled(nn.Module):
    """A layer with a buffer beside its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, inputs):
        return inputs * self.weight * self.scale


def trained(folder):
    """A checkpoint of a pipeline of one stage: a module in two layers, a function, a layer without parameters."""
    layers = [
        pipe.TiedLayerSpec("mix", nn.Linear, 4, 4),
        torch.tanh,
        nn.ReLU(),
        pipe.LayerSpec(Scaled),
        pipe.TiedLayerSpec("mix", nn.Linear, 4, 4),
    ]
    model = pipe.PipelineModule(layers, num_stages=1, loss_fn=nn.functional.mse_loss)
    model.get_submodule("3").weight.requires_grad_(False)
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "progress": {"enabled": False},
    }
    engine, *_ = mizzen.initialize(model=model, config=config)
    engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))]))
    engine.save_checkpoint(folder, client_state={"epoch": 7})
    engine.destroy()


def test_ours_are_read_as_deepspeed_files_with_every_weight(tmp_path, world):
    world(1).run(trained, str(tmp_path / "ours"))
    ours = open_source(tmp_path / "ours")
    written = export_layers(ours, tmp_path / "theirs", precision="saved")
    names = [f"layer_{number:02d}-model_states.pt" for number in (0, 2, 3, 4)]
    assert [path.name for path in written[1:]] == names
    assert torch.load(written[2]) == {}  # a layer without parameters has a file there too
    theirs = foreign.open(tmp_path / "theirs")
    expected, found = ({e.name: s.read(e) for e in weights_of(s).values()} for s in (ours, theirs))
    assert (
        found.keys() == expected.keys() == {"tied_modules.mix.weight", "tied_modules.mix.bias", "3.weight", "3.scale"}
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    facts = theirs.facts()
    assert (facts["global_steps"], facts["client_state"], facts["buffers"]) == (1, {"epoch": 7}, ["3.scale"])


def stepped(stages, folder="", resumed=""):
    """Moments, weights and the next loss of a pipeline that was trained for two steps, or goes on from a checkpoint."""
    layers = [
        pipe.TiedLayerSpec("mix", nn.Linear, 4, 4),
        torch.tanh,
        pipe.LayerSpec(nn.Linear, 4, 4),
        pipe.TiedLayerSpec("mix", nn.Linear, 4, 4),
    ]
    model = pipe.PipelineModule(layers, num_stages=stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    groups = [{"params": [p], "lr": 0.01 * (1 + p.dim())} for p in model.parameters()]
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "zero_optimization": {"stage": 1},
        "progress": {"enabled": False},
    }
    engine, *_ = mizzen.initialize(model=model, model_parameters=groups, config=config)
    draw = torch.Generator().manual_seed(1)
    batches = [(torch.randn(2, 4, generator=draw), torch.randn(2, 4, generator=draw)) for _ in range(3)]
    if resumed:
        assert engine.load_checkpoint(resumed)[0] is not None
    else:
        for each in batches[:2]:
            engine.train_batch(iter([each]))
        engine.save_checkpoint(folder)
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[name] = mizzen.zero.safe_get_full_fp32_param(parameter).clone()
        for state in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {state}"] = mizzen.zero.safe_get_full_optimizer_state(parameter, state).clone()
    return found, engine.global_steps, engine.train_batch(iter(batches[2:])).loss


def test_states_of_the_optimizer_come_back_at_another_number_of_stages(tmp_path, world):
    trained = world(2).run(stepped, 2, str(tmp_path / "ours"))
    export_layers(open_source(tmp_path / "ours"), tmp_path / "theirs")  # weights in bf16, masters in fp32
    assert (tmp_path / "theirs" / "latest_universal").read_text() == "global_step2"
    theirs = foreign.open(tmp_path / "theirs")
    assert theirs.what == "DeepSpeed universal checkpoint of ZeRO stage 1" and not theirs.left_out
    assert {entry.kind for entry in theirs.names()} == {"model", "master", "exp_avg", "exp_avg_sq", "step"}
    rates = [group["lr"] for group in theirs.facts()["optimizer"]["param_groups"]]
    assert sorted(rates) == [0.02, 0.02, 0.03, 0.03]
    convert(theirs, tmp_path / "back", "imported")
    ((found, steps, loss),) = world(1).run(stepped, 1, resumed=str(tmp_path / "back"))
    expected = {name: value for values, _, _ in trained for name, value in values.items()}
    assert found.keys() == expected.keys() and steps == 2
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert loss == pytest.approx(trained[0][2], rel=1e-5)


def test_what_deepspeed_wrote_of_an_optimizer_comes_out_again(tmp_path):
    given = open_source(FIXTURE)
    export_layers(given, tmp_path)
    found = foreign.open(tmp_path)
    states = {(entry.kind, entry.name): given.read(entry) for entry in given.names() if entry.kind != "model"}
    assert {("exp_avg", "tied_modules.embed.weight"), ("master", "3.bias")} < states.keys()
    again = {(entry.kind, entry.name): found.read(entry) for entry in found.names() if entry.kind != "model"}
    assert again.keys() == states.keys() and all(torch.equal(again[key], states[key]) for key in states)


def test_layers_and_states_of_an_earlier_export_are_gone(tmp_path):
    source = open_source(FIXTURE)
    export_layers(source, tmp_path)
    place = tmp_path / "global_step3"
    stale = [place / "layer_17-model_states.pt", place / "zero" / "gone.weight" / "exp_avg.pt"]
    stale[1].parent.mkdir()
    for path in stale:
        path.write_bytes(b"old")
    export_layers(source, tmp_path)
    assert not any(path.exists() for path in stale) and (place / "zero" / "3.bias" / "exp_avg.pt").exists()
    assert (tmp_path / "latest_universal").read_text() == "global_step3"
    export_layers(source, tmp_path, has_states=False)
    assert not (place / "zero").exists() and not (tmp_path / "latest_universal").exists()
    (tmp_path / "latest_universal").write_text("global_step30")  # of another step, whose states are there
    export_layers(source, tmp_path, has_states=False)
    assert (tmp_path / "latest_universal").read_text() == "global_step30"


class Named:
    """A source of one layer whose parameter and state have given names."""

    def __init__(self, layer, kind="exp_avg"):
        self.layer, self.kind = layer, kind

    def names(self):
        return [Entry(kind, f"{self.layer}.weight", (2,), torch.float32) for kind in ("model", self.kind)]

    def read(self, entry):
        return torch.zeros(entry.shape)

    def facts(self):
        return {"layers": [self.layer], "counters": {"global_steps": 1}}


@pytest.mark.parametrize("kind", ["../../../up", "/up", "a/b", "..", ".", "", "a\\b", "a\0b"])
def test_states_whose_names_lead_out_of_the_folder_are_refused(tmp_path, kind):
    with pytest.raises(CheckpointError, match="would lead elsewhere, or nowhere.*--no-states"):
        export_layers(Named("0", kind), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_absolute", [True, False])
def test_parameters_whose_names_lead_out_of_the_folder_are_refused(tmp_path, is_absolute):
    source = Named(str(tmp_path / "elsewhere") if is_absolute else "../../../elsewhere")
    with pytest.raises(CheckpointError, match=r"elsewhere\.weight.*would lead elsewhere, or nowhere.*--no-states"):
        export_layers(source, tmp_path / "out")
    export_layers(source, tmp_path / "out", has_states=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    inside = {path.name for path in (tmp_path / "out" / "global_step1").iterdir()}
    assert inside == {"layer_00-model_states.pt", "mp_rank_00_model_states.pt"}


def test_a_model_that_is_no_list_of_layers_has_no_files_of_layers(tmp_path):
    torch.save({"embed.weight": torch.zeros(2)}, tmp_path / "plain.pt")
    with pytest.raises(
        CheckpointError, match=r"embed.weight: of no layer of a pipeline.*export others without --layers"
    ):
        export_layers(open_source(tmp_path / "plain.pt"), tmp_path / "out")
