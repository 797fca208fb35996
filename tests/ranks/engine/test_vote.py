"""Ranks that decide together, of which some have no losses by their role."""

import math

import pytest
import torch
import torch.distributed as dist

import mizzen
from breadth import choice
from mizzen.accelerator import Fetch
from mizzen.comm import collectives
from mizzen.engine.vote import StepSums, Vote
from mizzen.plan.losses import Role, Tally
from parity.programs import Case, build, micro_batches

NOTHING = StepSums(0.0, None, 0.0, False, False, False, False, False, False, False, True, 1)


def votes(numbers: dict) -> list:
    """Four ranks of which two have losses; each counts a quarter of the squares."""
    rank = dist.get_rank()
    speaks = rank >= 2
    vote = Vote(dist.group.WORLD, torch.device("cpu"), Role(2, has_losses=speaks))
    mine = NOTHING._replace(**{"squares": torch.tensor(4.0, dtype=torch.float64)} | numbers.get(rank, {}))
    if speaks:
        mine = mine._replace(loss=torch.tensor(float(rank)), count=1.0, losses=True)
    decision = vote.start(mine, vote.terms(lambda *_: 1.0)).read()
    return [decision, vote.explain_nonfinite(["w"] if math.isnan(float(mine.squares)) else [])]


def test_the_loss_is_the_mean_of_those_who_have_one(world):
    for decision, _ in world(4).run(votes, {}):
        assert (decision.loss, decision.norm, decision.factor, decision.micros) == (2.5, 4.0, 1.0, 1.0)
        assert decision.applied and decision.is_foreseen and not decision.stops


@pytest.mark.parametrize("asked", [0, 3])
def test_a_request_that_reaches_one_rank_stops_all(world, asked):
    assert all(decision.stops for decision, _ in world(4).run(votes, {asked: {"requests": True}}))


def test_a_gradient_that_is_not_finite_on_one_rank_is_named_everywhere(world):
    for decision, named in world(4).run(votes, {1: {"squares": math.nan}}):
        assert decision.verdict == "skip" and decision.has_overflowed
        assert named == "gradient not finite on rank 1: w"


def trained(stage: int, ahead: bool, broken: int) -> list:
    """Ranks 0 and 1 have gradients and no losses; in the steps from the third on losses are counted."""
    case = Case(stage, 4, samples=8, clip=0.1)
    engine, *_ = mizzen.initialize(model=build(case), config=case.config)
    speaks = engine.global_rank >= 2
    engine.updater.goes_ahead = ahead
    engine.updater.vote.role = Role(2, has_losses=speaks)
    told = []
    for step in range(5):
        loss = engine(*micro_batches(case, step, engine.global_rank))
        engine.backward(loss * math.nan if step == broken and engine.global_rank == 1 else loss)
        tally = Tally().plus(loss, 3.0 if step >= 2 else 1.0, is_counted=step >= 2)
        if not speaks:
            engine.updater.scaler.has_scaled = False
            tally = Tally()
        engine.step_in_progress.tally = tally
        report = engine.step()
        told.append((report.applied, report.loss, report.grad_norm, "rank 1: " in report.reason))
    values = [mizzen.zero.safe_get_full_fp32_param(each) for each in engine.module.parameters()]
    return [str(told), told, values]


@pytest.mark.parametrize("stage", choice([1, 3], [3]))
def test_ranks_without_losses_take_the_same_steps(world, stage):
    """Whether steps are launched ahead or not, also where the kind of losses changes, which they cannot know."""
    plain, ahead = world(4).each(trained, [(stage, how, 3) for how in (False, True)])
    for (said, told, values), (said_ahead, _, values_ahead) in zip(plain, ahead, strict=True):
        assert said == said_ahead == plain[0][0]
        assert [applied for applied, *_ in told] == [True, True, True, False, True]
        assert [is_named for *_, is_named in told] == [False, False, False, True, False]
        assert all(map(torch.equal, values, values_ahead))
        assert all(map(torch.equal, values, plain[0][2]))


def gained(relative: float) -> list:
    """A store whose gain is that of the vote, or a part of it; SGD, since Adam hides a factor."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "progress": {"enabled": False},
        "gradient_allreduce_op": "sum",
        "gradient_clipping": 0.0,
    }
    engine, *_ = mizzen.initialize(model=model, config=config)
    before = model.weight.detach().clone()
    engine.updater.vote.gain /= relative
    engine.backward(engine(torch.ones(2, 4)).mean())
    report = engine.step()
    return [report.grad_norm, (before - model.weight).detach().flatten().tolist()]


@pytest.mark.parametrize("relative", [1.0, 0.5])
def test_a_sum_gains_by_the_ranks_of_the_mean(world, relative):
    for norm, moved in world(2).run(gained, relative):
        assert norm == pytest.approx(2 * 2.0)
        assert moved == pytest.approx([0.5 * 2.0] * 4)


def waits() -> list:
    """The reductions of a step, and the times that the host reads what they have brought."""
    case = Case(1, 2, samples=8, clip=0.1)
    engine, *_ = mizzen.initialize(model=build(case), config=case.config)
    seen = []
    reduce, read = collectives.all_reduce, Fetch.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_reduce", lambda *a, **k: (seen.append("reduced"), reduce(*a, **k))[1])
        patch.setattr(Fetch, "read", lambda self: (seen.append("read"), read(self))[1])
        engine.backward(engine(*micro_batches(case, 0, engine.global_rank)))
        engine.step()
    return seen


def test_a_step_has_one_reduction_and_one_read(world):
    assert world(2).run(waits) == [["reduced", "read"]] * 2
