"""Progressive layer drop: what the model is told, step by step."""

import math

import pytest
import torch
from torch import nn

import mizzen
from mizzen.errors import PlanError


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.told = []

    def forward(self, inputs, progressive_layer_drop=False, pld_theta=None):
        self.told.append((progressive_layer_drop, pld_theta))
        return self.layer(inputs).square().mean()


class Keywords(Dropping):
    def forward(self, inputs, **kwargs):
        return super().forward(inputs, **kwargs)


CONFIG = {
    "train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.1},
}


def run(kind):
    model = kind()
    engine, *_ = mizzen.initialize(model=model, config=CONFIG)
    inputs = torch.ones(1, 4)
    for _ in range(6):
        engine.backward(engine(inputs))
        engine.step()
    engine.eval()
    engine(inputs)
    engine.train()
    engine(inputs, pld_theta=0.25)
    engine.destroy()
    model(inputs)
    return model.told


@pytest.mark.parametrize("kind", [Dropping, Keywords])
def test_the_model_is_told_in_every_training_step(world, kind):
    thetas = [0.5 * math.exp(-0.1 * step) + 0.5 for step in (0, 0, 1, 1, 2, 2, 3)]
    for told in world(2).run(run, kind):
        assert [theta for _, theta in told[:6]] == pytest.approx(thetas[:6])
        assert all(flag for flag, _ in told[:6])
        assert told[6] == (False, None)  # in evaluation every layer counts
        assert told[7] == (True, 0.25)  # the caller's own word holds
        assert told[8] == (False, None)  # the engine is gone


def refused():
    with pytest.raises(PlanError, match="Linear.forward does not take pld_theta and progressive_layer_drop; add the"):
        mizzen.initialize(model=nn.Linear(2, 2), config=CONFIG | {"train_batch_size": 2})


def test_a_model_that_does_not_listen_is_refused(world):
    world(1).run(refused)


def resumed(folder):
    config = CONFIG | {"gradient_accumulation_steps": 1, "train_batch_size": 1}
    engine, *_ = mizzen.initialize(model=Dropping(), config=config)
    inputs = torch.ones(1, 4)
    for _ in range(3):
        engine.backward(engine(inputs))
        engine.step()
    engine.save_checkpoint(folder)
    model = Dropping()
    other, *_ = mizzen.initialize(model=model, config=config)
    other.load_checkpoint(folder)
    other(inputs)
    return model.told[-1][1], other.get_pld_theta(), engine.get_pld_theta()


def test_it_goes_on_where_a_checkpoint_was(world, tmp_path):
    ((told, asked, before),) = world(1).run(resumed, tmp_path)
    assert told == asked == before == pytest.approx(0.5 * math.exp(-0.3) + 0.5)
