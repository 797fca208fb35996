"""Models that are hard to shard train at stage 3 as they do at stage 2, bit by bit where the order of sums is fixed."""

import pytest
import torch

from breadth import chosen
from mizzen.parallel.zero.full import gradients
from mizzen.parallel.zero.full.gradients import UseOutside
from ranks.parallel.zero.full.models import MODELS, rows, start, train


def halves(ranks, *marks):
    """The models in two halves."""
    for number, half in enumerate((list(MODELS)[::2], list(MODELS)[1::2])):
        yield pytest.param(ranks, half, marks=marks, id=f"{ranks}-{number}")


@pytest.mark.parametrize(("ranks", "kinds"), [*halves(2), *halves(3, pytest.mark.wide)])
def test_stage_3_is_stage_2(world, ranks, kinds):
    cases = [(kind, stage) for kind in kinds for stage in (2, 3)]
    results = world(ranks).each(train, cases, steps=3, deterministic=True)
    for kind, expected, found in zip(kinds, results[::2], results[1::2], strict=True):
        assert len(set(expected[0][0])) > 1, kind
        for (losses, norms, values), (their_losses, their_norms, others) in zip(found, expected, strict=True):
            assert losses == pytest.approx(their_losses, rel=1e-6), kind
            assert norms == pytest.approx(their_norms, rel=1e-5), kind
            for name, value in values.items():
                torch.testing.assert_close(value, others[name], rtol=1e-5, atol=1e-6, msg=f"{kind}: {name}")


@pytest.mark.in_parts
def test_accumulation_gives_the_bits_of_stage_2(world):
    kinds = chosen(["Base", "TiedBlocks", "Branching", "Lora"], ["TiedBlocks", "Branching"])
    cases = [(kind, stage) for kind in kinds for stage in (2, 3)]
    more = {"steps": 3, "gradient_accumulation_steps": 4, "deterministic": True}
    results = [ranks[0] for ranks in world(2).each(train, cases, **more)]
    for kind, expected, found in zip(kinds, results[::2], results[1::2], strict=True):
        assert found[0] == expected[0], kind
        assert found[1] == expected[1], kind
        assert [name for name in expected[2] if not torch.equal(found[2][name], expected[2][name])] == [], kind


def touched(kind):
    """The parameters that a step gathers where they are touched, and what is said of them."""
    engine, said, gathers = start(kind, 3), [], []
    plainly, warn = UseOutside.gather, gradients.warn_once

    def gather(self, one):
        gathers.append(one.name)
        return plainly(self, one)

    UseOutside.gather, gradients.warn_once = gather, lambda message, key: said.append(message)
    engine.backward(engine(rows(0, engine.global_rank)))
    assert engine.step().applied
    UseOutside.gather, gradients.warn_once = plainly, warn
    return set(gathers), said


def test_what_is_used_outside_of_its_unit_is_gathered_there_and_said(world):
    gathers, said = world(2).run(touched, "Outside")[0]
    assert gathers == {f"blocks.{block}.{kind}" for block in ("0.down", "1.up") for kind in ("weight", "bias")}
    assert "'blocks.1.up.weight' is used outside of its unit 'blocks.1'" in said[0]
    assert world(2).run(touched, "Base")[0] == (set(), [])


def left(kind):
    """The gathered parameters that have a gradient after a backward, which is memory of whole parameters."""
    engine = start(kind, 3)
    for step in range(2):
        engine.backward(engine(rows(step, engine.global_rank)))
        engine.step()
    return [each.parameter.grad for unit in engine.stores[0].units for each in unit.parameters.values()]


@pytest.mark.parametrize("kind", ["Base", "Branching"])
def test_no_whole_gradient_is_left(world, kind):
    for found in world(2).run(left, kind):
        assert found and not any(gradient is not None for gradient in found)


def train_offloaded(stage, places):
    return train("Base", stage, deterministic=True, zero_optimization={"stage": stage, **places})


@pytest.mark.parametrize("stage", [1, 3])
def test_offload_to_the_host_has_no_effect_where_training_runs_there(world, stage):
    places = {"offload_optimizer": {"device": "cpu"}} | ({"offload_param": {"device": "cpu"}} if stage == 3 else {})
    cases = [(stage, {}), (stage, places)]
    expected, found = (ranks[0] for ranks in world(2).each(train_offloaded, cases))
    assert found[0] == expected[0]


def poisoned():
    """What the report says when one gradient of one rank is not a number."""
    engine = start("Base", 3)
    factor = torch.nan if engine.global_rank == 1 else 1.0
    with engine.stores[0].gather(["blocks.0.down.weight"]) as found:
        found["blocks.0.down.weight"].register_hook(lambda gradient: gradient * factor)
    engine.backward(engine(rows(0, engine.global_rank)))
    report = engine.step()
    return report.applied, report.reason


def test_a_gradient_that_is_not_finite_is_named(world):
    for applied, reason in world(2).run(poisoned):
        assert not applied
        assert reason == "step 1: gradient not finite on rank 1: blocks.0.down.weight"
