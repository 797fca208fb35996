"""A model in several parts, all on one rank or one on each: everything goes over all of them, by global names."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mizzen
from mizzen.accelerator import get_accelerator
from mizzen.checkpoint.read import Reader
from mizzen.comm.mesh import Mesh
from mizzen.config.layout import Layout
from mizzen.config.load import load
from mizzen.config.resolve import resolve
from mizzen.engine.build import build_engine
from mizzen.engine.prepare import stream_of, with_optimizer_groups
from mizzen.engine.runner import Accumulate, RunnerContext
from mizzen.engine.status import RunContext
from mizzen.environment import World
from mizzen.errors import CheckpointError, PlanError
from mizzen.model.home import Home, pieces_at
from mizzen.model.sketch import Sketch
from mizzen.order import ORDER
from mizzen.plan.parts import Part

CONFIG = {
    "train_batch_size": 4,
    "progress": {"enabled": False},
    "seed": 3,
}


class Remembers(nn.Module):
    """Wants something saved that is no tensor of the model."""

    def __init__(self):
        super().__init__()
        self.memory = {"seen": 0, "scale": torch.zeros(2)}

    def forward(self, inputs):
        return inputs

    def get_extra_state(self):
        return self.memory

    def set_extra_state(self, state):
        self.memory = state


def whole_model():
    torch.manual_seed(7)
    model = nn.Sequential()
    model.add_module("first", nn.Sequential(nn.Linear(6, 5), nn.Tanh(), Remembers()))
    model.add_module("second", nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), Remembers()))
    model.second[2].bias.requires_grad_(False)
    return model


def halves():
    """Each half of the model in a module of its own, in which names are those of the whole."""
    model = whole_model()
    found = []
    for name in ("first", "second"):
        half = nn.Sequential()
        half.add_module(name, model.get_submodule(name))
        found.append(half)
    return found


def chain(running: RunnerContext) -> Accumulate:
    """All parts one after the other."""
    module = nn.Sequential(*(part.module for part in running.parts))
    stores = tuple(store for part in running.parts for store in part.stores)
    return Accumulate(replace(running, parts=(Part(module, stores),)))


def start(modules, stage=0, layout=None, make_runner=chain):
    """An engine of the parts that this rank runs, as a plan that cuts a model would make it."""
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), 0)
    config = load(CONFIG | {"zero_optimization": {"stage": stage}})
    layout = layout or Layout.fit(world.size)
    home, drafts = Home.data_parallel(layout), []
    for number, module in enumerate(modules):
        optimizer = torch.optim.AdamW([each for each in module.parameters() if each.requires_grad])
        draft = with_optimizer_groups(Sketch.of(module), module, optimizer)
        drafts.append(draft.with_home(home.at("pp", number) if layout.pp > 1 else home))
    drafts, mesh = tuple(drafts), Mesh.build(layout, device_type="cpu")
    parts = tuple(Part(modules[piece]) for piece in pieces_at(world.rank, layout, len(modules)))
    for transform in ORDER:
        if (choice := transform.wants(config, layout, drafts)) is not None:
            parts, drafts = transform.apply(parts, choice, mesh), transform.redraw(choice, drafts)
    trained = [each for module in halves() for each in module.parameters() if each.requires_grad]
    resolved = replace(resolve(config, layout.dp), layout=layout)
    context = RunContext(
        resolved, {}, mesh, world, get_accelerator().device(), stream_of(config, 3, mesh), seed=3,
        groups=Sketch.of(whole_model()).with_groups({name: 0 for name, _ in whole_model().named_parameters()}).groups,
    )  # fmt: skip
    return build_engine(
        parts, context, optimizer=torch.optim.AdamW(trained, lr=1e-2), scheduler=None, observers=(),
        make_runner=make_runner,
    )  # fmt: skip


def train(engine, steps=2):
    losses = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        loss = engine(torch.randn(4, 6)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def values(engine):
    """Weights and optimizer states of this rank, and what modules remember."""
    found = dict(engine.module.state_dict())
    states = engine.basic_optimizer.state
    for store in engine.stores:
        for key in ("exp_avg", "exp_avg_sq"):
            found |= {f"{key} {piece.name}": piece.data for piece in store.pieces(key, states)}
    memory = {name: each.memory for name, each in engine.module.named_modules() if isinstance(each, Remembers)}
    plain = {name: each.detach().clone() for name, each in found.items() if isinstance(each, torch.Tensor)}
    return plain, {name: (each["seen"], each["scale"].tolist()) for name, each in memory.items()}


def same(mine, others):
    return [name for name, value in mine.items() if not torch.equal(value, others[name])]


def in_one(stage):
    """An engine of the model as it is."""
    model = whole_model()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    return mizzen.initialize(model=model, optimizer=optimizer, config=CONFIG | {"zero_optimization": {"stage": stage}})[
        0
    ]


def on_one_rank(root, stage):
    one = in_one(stage)
    two = start(halves(), stage)
    names = list(two.module.state_dict()) == list(one.module.state_dict())
    losses = train(one), train(two)
    two.module.get_submodule("second.3").memory = {"seen": 4, "scale": torch.ones(2)}
    two.save_checkpoint(f"{root}/two")
    one.save_checkpoint(f"{root}/one")
    later = start(halves(), stage)
    later.load_checkpoint(f"{root}/two")
    other = in_one(stage)
    other.load_checkpoint(f"{root}/two")
    (kept, memory), (again, remembered), (there, known) = values(two), values(later), values(other)
    again_one = start(halves(), stage)
    again_one.load_checkpoint(f"{root}/one")
    return {
        "names": names,
        "losses": losses,
        "differ": (same(kept, again), same(kept, there), same(values(one)[0], values(again_one)[0])),
        "memory": (memory == remembered == known, remembered["second.3"]),
        "after": (train(two), train(later), train(other)),
        "report": str(later.load_report),
    }


@pytest.mark.parametrize("stage", [0, 1])
def test_two_parts_on_one_rank_are_the_model(world, tmp_path, stage):
    (found,) = world(1).run(on_one_rank, str(tmp_path), stage)
    assert found["names"] and found["losses"][0] == found["losses"][1]
    assert found["differ"] == ([], [], []) and found["report"] == ""
    assert found["memory"] == (True, (4, [1.0, 1.0]))
    assert found["after"][0] == found["after"][1] == found["after"][2]


def on_two_ranks(root):
    """Each rank has one half: rank 0 alone knows neither the names nor the memory of the other."""
    rank = torch.distributed.get_rank()

    def engine():
        return start(halves(), layout=Layout(pp=2), make_runner=Accumulate)

    def step(engine):
        width = 6 - rank
        torch.manual_seed(5)
        engine.backward(engine(torch.randn(4, width)).square().mean())
        engine.step()

    mine = engine()
    step(mine)
    name = "first.2" if rank == 0 else "second.3"
    mine.module.get_submodule(name).memory = {"seen": rank + 1, "scale": torch.full((2,), rank + 1.0)}
    mine.save_checkpoint(root, client_state={"array": torch.arange(3)})
    later = engine()
    _, client = later.load_checkpoint(root)
    mine.save_16bit_model(root)
    gathered = mine._consolidated_16bit_state_dict()
    assert (gathered is None) == (rank > 0)
    return (
        same(values(mine)[0], values(later)[0]),
        values(later)[1],
        client["array"].tolist(),
        values(mine)[0],
        gathered,
    )


def back_on_one(root):
    """The same checkpoint in one part."""
    engine = in_one(0)
    engine.load_checkpoint(root)
    with Reader(Path(root) / "global_step1") as reader:
        return *values(engine), dict(reader.manifest.facts)


def test_ranks_with_different_parts_make_one_checkpoint(world, tmp_path):
    first, second = world(2).run(on_two_ranks, str(tmp_path))
    assert first[0] == second[0] == [] and first[2] == second[2] == [0, 1, 2]
    assert first[1] == {"first.2": (1, [1.0, 1.0])} and second[1] == {"second.3": (2, [2.0, 2.0])}
    ((kept, memory, facts),) = world(1).run(back_on_one, str(tmp_path))
    assert same(first[3] | second[3], kept) == [] and memory == first[1] | second[1]
    assert same(load_file(tmp_path / "model.safetensors"), kept) == [] == same(first[4], kept)
    assert facts["frozen"] == ["second.2.bias"] and "names" not in facts


def other_names(root):
    """A checkpoint that has a name which no rank knows, and lacks one that the second rank has."""
    rank = torch.distributed.get_rank()
    mine = start(halves(), layout=Layout(pp=2), make_runner=Accumulate)
    mine.save_checkpoint(f"{root}/saved")
    other = halves()
    if rank == 0:
        other[0].first[0].register_parameter("bias", None)
    else:
        other[1].second.add_module("extra", nn.Linear(2, 2))
    engine = start(other, layout=Layout(pp=2), make_runner=Accumulate)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        engine.load_checkpoint(f"{root}/saved")
    engine.load_checkpoint(f"{root}/saved", load_module_strict=False)
    return str(engine.load_report)


def test_all_ranks_report_the_same_names(world, tmp_path):
    first, second = world(2).run(other_names, str(tmp_path))
    assert first == second
    assert "2 missing: second.extra.weight, second.extra.bias" in first and "1 unexpected: first.0.bias" in first


def without_a_runner():
    with pytest.raises(PlanError, match="2 parts, and names no runner"):
        start(halves(), make_runner=Accumulate)


def test_parts_without_a_runner_are_refused(world):
    world(1).run(without_a_runner)
