"""What a step leaves behind when its schedule is refused, and what it says of itself."""

import pytest
import torch
from torch import nn

import mizzen
from mizzen.errors import ConfigError, UsageError


class Scalar(nn.Module):
    """Its loss is what it is given, times a weight that hardly moves."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value):
        return (self.weight * value).sum()


def build(optimizer=None, **more):
    config = {"train_batch_size": 1, "optimizer": optimizer or {"type": "SGD", "params": {"lr": 1e-9}}, **more}
    engine, *_ = mizzen.initialize(model=Scalar(), config=config)
    return engine


def step(engine, value, **more):
    engine.backward(engine(torch.tensor([value])))
    return engine.step(**more)


def second_owner():
    engine = build(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 1e-9}})
    step(engine, 1.0)
    engine.lr_scheduler.step()
    with pytest.raises(UsageError, match="the engine steps it after every applied step"):
        step(engine, 10.0)
    before = engine.global_steps
    engine.lr_scheduler = None
    engine.zero_grad()
    return before, step(engine, 100.0).loss


def test_a_second_owner_is_refused_before_the_step(world):
    ((steps, loss),) = world(1).run(second_owner)
    assert steps == 1
    assert loss == pytest.approx(100.0)


def momenta():
    cycle = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 2, "cycle_min_mom": 0.8}
    engine = build(
        {"type": "Adam", "params": {"lr": 0.1}},
        scheduler={"type": "OneCycle", "params": cycle | {"cycle_max_mom": 0.9}},
    )
    found = []
    for _ in range(3):
        used = [tuple(group["betas"]) for group in engine.basic_optimizer.param_groups]
        found.append((used, list(step(engine, 1.0).momentum)))
    return found


def test_the_momentum_of_a_report_is_that_of_its_step(world):
    (found,) = world(1).run(momenta)
    for used, told in found:
        assert [tuple(pair) for pair in told] == used
    assert len({used[0] for used, _ in found}) > 1


def setters():
    torch.compiler.set_stance("force_eager")  # torchao compiles its step
    engine = build({"type": "AdamW8bit", "params": {"lr": 0.1}})
    engine.set_lr(0.5)
    step(engine, 1.0)
    with pytest.raises(UsageError, match=r"set_lr\(\): \"x\" is not a number"):
        engine.set_lr("x")
    with pytest.raises(ConfigError, match=r"train_micro_batch_size_per_gpu: 1\.5 is not a whole number"):
        engine.set_train_micro_batch_size(1.5)
    with pytest.raises(ConfigError, match='train_batch_size: "x" is not'):
        engine.set_train_batch_size("x")
    engine.set_train_batch_size(4.0)
    return engine.get_lr(), engine.get_batch_info()


def test_setters_take_numbers_only(world):
    pytest.importorskip("torchao")
    ((rates, batch),) = world(1).run(setters)
    assert rates == [0.5]
    assert batch == (4, 1, 4)
    assert all(type(number) is int for number in batch)


def told():
    build(train_batch_size=2, graph_harvesting=True)
    engine = build(train_batch_size=2, graph_harvesting=True)
    engine.gradient_average = True
    with pytest.raises(mizzen.UsageError, match='set gradient_allreduce_op to "sum"'):
        engine.gradient_average = False
    return engine.gradient_average


def test_what_has_no_effect_is_told_once_by_the_first_rank(world, capfd):
    assert world(2).run(told) == [True, True]
    assert "".join(capfd.readouterr()).count("graph_harvesting has no effect here") == 1
