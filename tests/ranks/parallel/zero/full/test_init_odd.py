"""Modules that `zero.Init` meets while they are copied, tied or held in several places."""

import copy

import pytest
import torch
from torch import nn

from mizzen import zero
from ranks.parallel.zero.full.models import Base, rows, start


class Encoder(nn.Module):
    """torch's own encoder makes its layers by copying one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)

    def forward(self, data):
        return self.encoder(self.first(data)[None]).pow(2).mean()


class Tied(nn.Module):
    """A table of its own that is also the weight of a part."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(10, 4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table
        nn.init.normal_(self.table)

    def forward(self, data):
        return (self.head(data) @ self.table).pow(2).mean()


def losses(kind, is_early, threshold):
    torch.manual_seed(3)
    with zero.Init(enabled=is_early):
        model = kind()
    engine = start(model, 3, zero={"stage3_param_persistence_threshold": threshold})
    found = []
    for step in range(3):
        engine.backward(engine(rows(step, engine.global_rank)))
        found.append(engine.step().loss)
    return found, [name for name, each in model.named_parameters() if each.requires_grad]


@pytest.mark.parametrize("kind", [Encoder, Tied])
@pytest.mark.parametrize("threshold", [0, 40])
def test_they_train_as_plain_ones(world, kind, threshold):
    assert world(2).run(losses, kind, True, threshold) == world(2).run(losses, kind, False, threshold)


def copies() -> dict[str, bool]:
    with zero.Init():
        model = Base()
        model.blocks[2].up.weight = model.blocks[0].up.weight
        model.first.weight.requires_grad_(False)
        nn.init.ones_(model.last.weight)
    made = copy.deepcopy(model)
    found = {
        "cut": all(zero.facts_of(each).status == "sharded" for each in made.parameters()),
        "tied": made.blocks[2].up.weight is made.blocks[0].up.weight is not model.blocks[0].up.weight,
        "frozen": [each.requires_grad for each in made.first.parameters()] == [False, True],
        "values": torch.equal(made.last.weight.detach().clone(), torch.ones(1, 8)),
    }
    with zero.GatheredParameters(list(model.parameters())):
        whole = copy.deepcopy(model)
    found["whole"] = all(type(each) is nn.Parameter for each in whole.parameters())
    found["alike"] = all(torch.equal(a, b.detach()) for a, b in zip(whole.parameters(), made.parameters(), strict=True))
    return found


def test_copies(world):
    for found in world(2).run(copies):
        assert [what for what, holds in found.items() if not holds] == []


def hooks(stage, is_early) -> dict[str, bool]:
    """Hooks from before there is an engine, which see this rank's own gradient."""
    torch.manual_seed(3)
    with zero.Init(enabled=is_early):
        model = Base()
    seen = []
    model.first.weight.mark = "kept"
    handle = model.first.weight.register_hook(lambda gradient: gradient * 0)
    model.last.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(tuple(parameter.shape)))
    engine = start(model, stage)
    engine.backward(engine(rows(0, engine.global_rank)))
    found = {
        "called": bool((zero.safe_get_full_grad(model.first.weight) == 0).all()) and seen == [(1, 8)],
        "applied": engine.step().applied,
    }
    handle.remove()
    engine.backward(engine(rows(1, engine.global_rank)))
    found["removed"] = bool((zero.safe_get_full_grad(model.first.weight) != 0).any())
    engine.destroy()
    found["marked"] = model.first.weight.mark == "kept"
    model(rows(2, 0)).backward()
    found["after"] = len(seen) == 3
    return found


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("is_early", [False, True])
def test_hooks_and_marks_stay(world, stage, is_early):
    for found in world(2).run(hooks, stage, is_early):
        assert [what for what, holds in found.items() if not holds] == []


def start_inside(is_inside):
    torch.manual_seed(3)
    with zero.Init(enabled=is_inside):
        engine = start(Base(), 3, zero={"stage3_param_persistence_threshold": 20})
        losses = [engine.train_batch(iter([rows(0, engine.global_rank)])).loss]
        later = nn.Sequential(nn.Linear(4, 4))
    losses += [engine.train_batch(iter([rows(step, engine.global_rank)])).loss for step in range(1, 3)]
    return losses, zero.facts_of(later[0].weight).status


def test_an_engine_may_be_made_inside(world):
    for inside, outside in zip(world(2).run(start_inside, True), world(2).run(start_inside, False), strict=True):
        assert inside == (outside[0], "sharded")
