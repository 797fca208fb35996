"""Two engines in one graph: what the backward of one leaves on the parameters of the other is forgotten."""

import pytest
import torch
from torch import nn

import mizzen
from ranks.parallel.zero.full.models import rows

RANKS = 2


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return generator, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def config(stage: int, **more: object) -> dict[str, object]:
    return {
        "train_batch_size": 4 * RANKS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "progress": {"enabled": False},
        **more,
    }


def losses(generator, discriminator, step: int, rank: int):
    """The two of one round, as they are needed."""
    noise, real = rows(step, rank), rows(step + 100, rank)
    yield (discriminator(real) - 1).pow(2).mean() + discriminator(generator(noise).detach()).pow(2).mean()
    yield (discriminator(generator(noise)) - 1).pow(2).mean()


def plain() -> list[torch.Tensor]:
    """The loop without a library, on the data of all ranks."""
    pair = models()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, weight_decay=0.01) for each in pair]
    for step in range(3):
        every = [losses(*pair, step, rank) for rank in range(RANKS)]
        for optimizer in reversed(optimizers):
            optimizer.zero_grad()
            torch.stack([next(each) for each in every]).mean().backward()
            optimizer.step()
    return [parameter.detach() for each in pair for parameter in each.parameters()]


def adversaries(stage: int, how: str) -> list[torch.Tensor]:
    pair = models()
    engines = [mizzen.initialize(model=each, config=config(stage))[0] for each in pair]
    for step in range(3):
        found = losses(*engines, step, engines[0].global_rank)
        for engine in reversed(engines):
            is_late = how == "module, after forward"
            loss = next(found) if is_late else None
            {"optimizer": engine.optimizer, "engine": engine}.get(how, engine.module).zero_grad()
            engine.backward(next(found) if loss is None else loss)
            assert engine.step().applied
    return [mizzen.zero.safe_get_full_fp32_param(each) for model in pair for each in model.parameters()]


@pytest.mark.parametrize("how", ["module", "module, after forward", "optimizer", "engine"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adversaries_train_as_without_a_library(world, stage, how):
    for found in world(RANKS).run(adversaries, stage, how):
        torch.testing.assert_close(found, plain(), rtol=1e-4, atol=1e-6)


def forgotten_in_low_precision(stage: int) -> bool:
    """Gradients of bf16 parameters are taken off them in a forward, unless somebody may still take them back."""
    engine = mizzen.initialize(model=nn.Linear(4, 1), config=config(stage, bf16={"enabled": True}))[0]
    data = rows(0, engine.global_rank)
    engine(data.bfloat16()).mean().backward()
    loss = engine(data.bfloat16()).float().pow(2).mean()
    engine.module.zero_grad()
    engine.backward(loss)
    return engine.step().applied


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_forward_does_not_hide_what_may_be_taken_back(world, stage):
    assert world(RANKS).run(forgotten_in_low_precision, stage) == [True] * RANKS


def not_forgotten(stage: int) -> bool:
    generator, discriminator = (mizzen.initialize(model=each, config=config(stage))[0] for each in models())
    for step in range(2):
        found = losses(generator, discriminator, step, generator.global_rank)
        for engine in (discriminator, generator):
            engine.backward(next(found))
            engine.step()
    return False


@pytest.mark.parametrize("stage", [1, 3])
def test_what_nobody_forgets_is_refused_with_the_way_out(world, stage):
    for outcome in world(RANKS).run(not_forgotten, stage, expect_failure=True):
        assert outcome.error_type == "UsageError"
        assert "zero_grad(), before backward" in outcome.traceback
