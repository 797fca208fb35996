"""What happens while parameters are gathered: writes by others, contexts inside, errors, engines that come and go."""

import pytest
import torch
from torch import nn

import mizzen
from mizzen import zero
from ranks.parallel.zero.full.models import Base, rows, start


def fill(weight, value, rank):
    with torch.no_grad():
        if torch.distributed.get_rank() == rank:
            weight.fill_(value)


def writes(stage) -> dict[str, float]:
    """The mean of a weight after each way to write to it."""
    engine = start("Base", stage)
    first, found = engine.module.first, {}
    with zero.GatheredParameters([first.weight, first.bias]):
        with zero.GatheredParameters(first.weight, modifier_rank=0):
            fill(first.weight, 5.0, 0)
        found["seen 5"] = first.weight.mean().item()
    found["kept 5"] = zero.safe_get_full_fp32_param(first.weight).mean().item()
    with zero.GatheredParameters(first.weight, modifier_rank=1), zero.GatheredParameters(first.weight, modifier_rank=0):
        fill(first.weight, 6.0, 0)
    found["kept 6"] = zero.safe_get_full_fp32_param(first.weight).mean().item()
    with zero.GatheredParameters(first.weight, modifier_rank=0):
        zero.safe_set_full_fp32_param(first.weight, torch.full((8, 4), 7.0))
        found["seen 7"] = first.weight.mean().item()
    found["kept 7"] = zero.safe_get_full_fp32_param(first.weight).mean().item()
    return found


def early_writes() -> dict[str, float]:
    with zero.Init():
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    first, found = model[0], {}
    with zero.GatheredParameters(list(model.parameters())):
        with zero.GatheredParameters([first.weight, first.weight], modifier_rank=0):
            fill(first.weight.data, 5.0, 0)
        found["seen 5"] = first.weight.mean().item()
    found["kept 5"] = first.weight.mean().item()
    return found


@pytest.mark.parametrize("program", [(writes, 1), (writes, 3), (early_writes,)])
def test_what_is_written_inside_is_there_for_those_around(world, program):
    for found in world(2).run(*program):
        assert found == {what: float(what.split()[1]) for what in found}


class Failing(Base):
    fails = False

    def hidden(self, rows):
        hidden = super().hidden(rows)
        if self.fails:
            raise MemoryError("too many rows")
        return hidden


def try_again() -> dict[str, bool]:
    """One rank alone runs out of memory, and goes on with fewer rows."""
    engine = start(Failing(), 3)
    model, found = engine.module, {}
    with zero.unwrap_model_for_generation(engine), torch.no_grad():
        if engine.global_rank == 0:
            model.fails = True
            with pytest.raises(MemoryError):
                model(rows(0, 0))
            model.fails = False
            model(rows(0, 0))
        found["still whole"] = all(type(each) is nn.Parameter for each in model.parameters())
    found["sharded again"] = all(zero.facts_of(each).status == "sharded" for each in model.parameters())
    engine.backward(engine(rows(0, engine.global_rank)))
    found["trains"] = engine.step().applied
    return found


def change_hands() -> dict[str, bool]:
    engine = start("Base", 3)
    model, found = engine.module, {}
    for call in (engine.destroy, lambda: start(model, 3)):
        refused = pytest.raises(mizzen.UsageError, match="inside GatheredParameters")
        with refused, zero.GatheredParameters(model.first.weight):
            call()
    again = start(model, 3)
    again.backward(again(rows(0, again.global_rank)))
    found["trains"] = again.step().applied
    return found


@pytest.mark.parametrize("program", [try_again, change_hands])
def test_training_goes_on_after_an_error_inside(world, program):
    for found in world(2).run(program):
        assert [what for what, holds in found.items() if not holds] == []


def set_between(stage, is_local):
    """A gradient that is set to 1 between two backwards of a step, and what is there after the second."""
    engine = start("Base", stage, gradient_accumulation_steps=2)
    weight = engine.module.first.weight
    for micro in range(2):
        engine.backward(engine(rows(micro, engine.global_rank, 2)))
        found = zero.safe_get_full_grad(weight)
        if is_local:
            zero.safe_set_local_grad(weight, torch.ones_like(zero.safe_get_local_grad(weight)))
        else:
            zero.safe_set_full_grad(weight, torch.ones(8, 4))
        engine.step()
    return found


@pytest.mark.parametrize("is_local", [False, True])
def test_what_comes_later_is_added_to_a_gradient_that_was_set(world, is_local):
    (expected, _), *others = world(2).each(set_between, [(stage, is_local) for stage in (3, 0, 1, 2)])
    for ranks in others:
        for found in ranks:
            assert torch.allclose(found, expected, atol=1e-6)
