"""What somebody does to a sharded parameter, or with an object that was one, works or is refused by its name."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import mizzen
from mizzen import zero
from ranks.parallel.zero.full.models import Base, rows, start
from ranks.parallel.zero.full.test_access import touched


class Resetting(Base):
    """Writes to its parameters in methods other than forward."""

    def fill(self):
        nn.init.constant_(self.blocks[0].up.weight, 0.5)

    def set_rows(self):
        with torch.no_grad():
            self.blocks[0].up.weight[0] = 0.5

    def write_out(self):
        with torch.no_grad():
            torch.add(torch.ones(16, 8), 1.0, out=self.blocks[0].up.weight)

    def replace_data(self):
        self.blocks[0].up.weight.data = torch.ones(16, 8)


def assign(module):
    module.weight = nn.Parameter(torch.ones(8, 4))


def take_away(module):
    del module.weight


def writes() -> dict[str, bool]:
    """No write is lost without a word."""
    engine = start(Resetting(), 3)
    model, data = engine.module, rows(0, engine.global_rank)
    before = zero.safe_get_full_fp32_param(model.blocks[0].up.weight)
    found = {
        name: "blocks.0.up.weight" in touched(getattr(engine, name))
        for name in ("fill", "set_rows", "write_out", "replace_data")
    }
    found["nothing was written"] = torch.equal(zero.safe_get_full_fp32_param(model.blocks[0].up.weight), before)
    for change in (assign, take_away):
        change(model.first)
        found[f"{change.__name__} at rest"] = "'first.weight' was replaced" in touched(lambda: engine(data))
    with pytest.raises(mizzen.UsageError, match="first.weight"), zero.GatheredParameters(model.first.weight):
        assign(model.first)
    found["sharded again"] = zero.facts_of(model.first.weight).status == "sharded"
    with zero.GatheredParameters(model.parameters()):
        engine.backward(engine(data))
        found["whole after backward"] = type(model.first.weight) is type(model.blocks[0].up.weight) is nn.Parameter
        found["no step inside"] = "inside GatheredParameters" in touched(engine.step)
    found["trains"] = engine.step().applied
    return found


def copies() -> dict[str, bool]:
    """What is taken of a shard: other objects, averages, files."""
    engine = start("Base", 3)
    model, weight = engine.module, engine.module.first.weight
    found = {
        "a number": "norm() on 'first.weight'" in touched(lambda: weight.detach().norm()),
        "mixed": "first.weight" in touched(lambda: weight.detach() + torch.ones(8, 4)),
        "deepcopy": "cannot be copied" in touched(lambda: copy.deepcopy(model)),
        "pickle": "cannot be copied" in touched(lambda: pickle.dumps(model)),
    }
    average = weight.detach().clone()
    average.mul_(0.5).add_(weight, alpha=0.5)
    found["average"] = torch.allclose(average.full_tensor(), zero.safe_get_full_fp32_param(weight))
    engine.load_module_state_dict(model.state_dict())
    found["its own state"] = torch.equal(average.to_local(), weight.to_local())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    found["file"] = all(
        loaded[name].full_tensor().equal(value.full_tensor()) for name, value in model.state_dict().items()
    )
    found["its own shards"] = len(file.getvalue()) < 40_000
    return found


def held_objects() -> dict[str, bool]:
    """References from before the engine, and after it."""
    with zero.Init():
        model = Base()
    early = model.first.weight
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = start(model, 3)
    found = {
        "the same object": early is model.first.weight and "'first.weight'" in touched(lambda: early.sum()),
        "known": zero.safe_get_full_fp32_param(early).shape == (8, 4),
        "sharded": zero.facts_of(early).status == "sharded",
        "another optimizer": "'first.weight'" in touched(other.step),
    }
    shard = model.first.weight
    engine.destroy()
    found["given back"] = shard is model.first.weight and type(shard) is nn.Parameter and shard.sum().isfinite()
    found["nobody's"] = zero.safe_get_full_fp32_param(shard) is None
    found["nothing to gather"] = zero.facts_of(shard).status == "whole"
    return found


@pytest.mark.parametrize("program", [writes, copies, held_objects])
def test_every_touch_works_or_is_refused_by_name(world, program):
    for found in world(2).run(program):
        assert [what for what, holds in found.items() if not holds] == []


def states(stage) -> dict[str, bool]:
    """States by parameter, whoever owns them."""
    torch.manual_seed(3)
    muon = {"type": "Muon", "params": {"lr": 0.01}}
    engine = start(Base(), stage, optimizer=muon)
    engine.backward(engine(rows(0, engine.global_rank)))
    engine.step()
    weight, bias = engine.module.first.weight, engine.module.first.bias
    own = zero.safe_get_local_optimizer_state(weight, "momentum_buffer")
    whole = zero.safe_get_full_optimizer_state(weight, "momentum_buffer")
    held = torch.tensor(own.numel())
    mizzen.comm.all_reduce(held)
    return {
        "parts add up": int(held) == 32 * (1 if stage else 2) and float(whole.abs().sum()) > 0,
        "not its rule's": zero.safe_get_full_optimizer_state(weight, "exp_avg") is None,
        "not its shape": zero.safe_get_full_optimizer_state(bias, "step") is None,
        "nor to be set": "'step' of the shape"
        in touched(lambda: zero.safe_set_full_optimizer_state(bias, torch.ones(8), "step")),
        "local": "'bogus'" in touched(lambda: zero.safe_get_local_optimizer_state(bias, "bogus")),
        "written": "'bogus'" in touched(lambda: zero.safe_set_local_optimizer_state(bias, torch.ones(4), "bogus")),
        "too much": "the value given has 99"
        in touched(lambda: zero.safe_set_local_optimizer_state(weight, torch.ones(99), "momentum_buffer")),
    }


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_states_that_are_not_kept_are_not_zeros(world, stage):
    for found in world(2).run(states, stage):
        assert [what for what, holds in found.items() if not holds] == []


def own_gradient(stage: int) -> bool:
    """Rank 1 alone writes to its own part of a gradient; nobody else has to be there."""
    engine = start("Base", stage)
    engine.backward(engine(rows(0, engine.global_rank)))
    weight = engine.module.blocks[0].up.weight
    if engine.global_rank == 1:
        zero.safe_set_local_grad(weight, torch.zeros_like(zero.safe_get_local_grad(weight)))
        return not zero.safe_get_local_grad(weight).any()
    return True


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_writes_to_its_own_part_of_a_gradient_alone(world, stage):
    assert world(2).run(own_gradient, stage) == [True, True]


def another_side(stage: int) -> list[bool]:
    """A parameter is frozen, thawed again, and one that was frozen is thawed: no step may go on as if nothing was."""
    torch.manual_seed(3)
    model = Base()
    model.first.bias.requires_grad_(False)
    engine = start(model, stage)

    def step():
        engine.backward(engine(rows(0, engine.global_rank)))
        engine.step()

    def value(name):
        with zero.GatheredParameters(getattr(model.first, name)):
            return getattr(model.first, name).detach().clone()

    step()
    found = []
    for name, wants in (("weight", False), ("bias", True)):
        before = value(name)
        getattr(model.first, name).requires_grad_(wants)
        found.append("requires_grad of" in touched(step))
        getattr(model.first, name).requires_grad_(not wants)
        found.append(torch.equal(value(name), before))
        engine.zero_grad()
        step()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nobody_changes_sides_unseen(world, stage):
    assert world(2).run(another_side, stage) == [[True] * 4] * 2
