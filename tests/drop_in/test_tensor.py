"""`deepspeed.module_inject.layers`: layers made from whole ones compute what these do, and an engine trains them."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drop_in import programs

WIDTH, INNER, CLASSES, STEPS = 6, 10, 7, 3


class Model(nn.Module):
    """A gated network and a head; with a group its layers are cut over it."""

    def __init__(self, group=None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.pack, self.up = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, INNER)
        self.down, self.head = nn.Linear(INNER, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        if group is not None:
            programs.deepspeed()
            from deepspeed.module_inject.layers import (
                GateUpPack_LinearLayer,
                LinearAllreduce,
                LinearLayer,
                LmHeadLinearAllreduce,
            )

            self.pack = GateUpPack_LinearLayer(self.pack, group)
            self.up = nn.Sequential(Gather(group), LinearLayer(self.up, group, name="up"))
            self.down, self.head = LinearAllreduce(self.down, group), LmHeadLinearAllreduce(self.head, group)

    def forward(self, x, labels):
        gate, value = self.pack(x).chunk(2, -1)
        hidden = torch.tanh(self.up(torch.sigmoid(gate) * value))
        return nn.functional.cross_entropy(self.head(x + self.down(hidden)), labels)


class Gather(nn.Module):
    def __init__(self, group) -> None:
        super().__init__()
        self.group = group

    def forward(self, x):
        from mizzen.parallel.tensor.exchange import gather_along

        return gather_along(x, -1, self.group)


def batch(step: int):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, WIDTH, generator=generator), torch.randint(0, CLASSES, (4,), generator=generator)


def train() -> tuple:
    deepspeed = programs.deepspeed()
    from deepspeed.utils import groups

    model = Model(dist.group.WORLD)
    kept = model.down.weight
    config = {
        "train_batch_size": 4,
        "tensor_parallel_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    losses = []
    for step in range(STEPS):
        loss = engine(*batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    asked = (groups.get_tensor_model_parallel_world_size(), groups.get_tensor_model_parallel_rank())
    down = model.down
    shape = tuple(down.weight.shape)
    whole = nn.Parameter(down.weight.detach().clone())
    down.gather_params([whole, None])
    return losses, asked, kept is not None, shape, whole.detach(), str(down)


def test_layers_made_from_whole_ones_train_as_these(world):
    model = Model()
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for step in range(STEPS):
        loss = model(*batch(step))
        rule.zero_grad()
        loss.backward()
        rule.step()
        expected.append(loss.item())
    for rank, (losses, asked, _, shape, whole, shown) in enumerate(world(2).run(train)):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert asked == (2, rank)
        assert shape == (WIDTH, INNER // 2)
        torch.testing.assert_close(whole, model.down.weight.detach())
        assert shown == "LinearAllreduce(weight [6, 5], tp=2, bias=True)"


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, inputs, targets=None):
        found = self.down(self.up(inputs).relu())
        return found if targets is None else nn.functional.mse_loss(found, targets)


def split_by_a_call() -> tuple:
    deepspeed = programs.deepspeed()
    model = deepspeed.tp_model_init(Plain(), tp_size=2, dtype=torch.float32)
    config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        loss = engine(torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, tuple(model.up.weight.shape)


def test_a_model_is_split_by_tp_model_init(world):
    model = Plain()
    rule, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator))
        rule.zero_grad()
        loss.backward()
        rule.step()
        expected.append(loss.item())
    for losses, shape in world(2).run(split_by_a_call):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert shape == (INNER // 2, WIDTH)


def counted_once(file: str) -> dict:
    """Samples of a step and ranks for each matrix, by the way in which a script says that two ranks share them."""
    deepspeed = programs.deepspeed()
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    sizes["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    section = {"tensor_parallel": {"autotp_size": 2}}
    Path(file).write_text(json.dumps(sizes | section))
    ways = {
        "config": {"config": sizes | section},
        "flag": {"args": Namespace(deepspeed_config=file)},
        "tp_model_init": {"config": sizes, "model": deepspeed.tp_model_init(Plain(), 2, torch.float32)},
        "tp": {"config": sizes | {"tensor_parallel": {"tp": {"tp_size": 2}}}},
        "tensor_parallel": {"config": sizes | {"tensor_parallel": {"tensor_parallel": {"tp_size": 2}}}},
        "path": {"config": sizes | {"tensor_parallel.autotp_size": 2}},
        "not cut": {"config": sizes},
    }
    found = {}
    for name, given in ways.items():
        engine, *_ = deepspeed.initialize(**{"model": Plain()} | given)
        found[name] = engine.train_batch_size(), engine.run_context.resolved.layout.tp
        engine.destroy()
    return found


def test_samples_are_counted_once_whichever_way_a_script_says_that_ranks_share_them(world, tmp_path):
    for found in world(2).run(counted_once, str(tmp_path / "config.json")):
        assert found.pop("not cut") == (8, 1)
        assert found == dict.fromkeys(("config", "flag", "tp_model_init", "tp", "tensor_parallel", "path"), (4, 2))


def test_modes_and_weights_of_ones_own():
    deepspeed = programs.deepspeed()
    from deepspeed.module_inject import LinearLayer
    from deepspeed.module_inject.layers import get_auto_tp_mode, is_autotp_training_mode
    from deepspeed.runtime.tensor_parallel.config import AUTOTP_MODE

    deepspeed.set_autotp_mode(training=True)
    assert is_autotp_training_mode() and get_auto_tp_mode() is AUTOTP_MODE.TRAINING
    weight, bias = torch.randn(3, 4), torch.randn(3)
    made = LinearLayer.from_weights(weight=weight, bias=bias)
    x = torch.randn(2, 4)
    torch.testing.assert_close(made(x), nn.functional.linear(x, weight, bias))


class Fused(nn.Module):
    """Three outputs in one matrix, of which two are small, and a matrix that reads two of them side by side."""

    def __init__(self, group=None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.pack, self.join = nn.Linear(WIDTH, 8 + 4 + 4), nn.Linear(8 + 4, WIDTH)
        self.last = nn.Linear(WIDTH, 12)
        self.parts = 1
        if group is not None:
            programs.deepspeed()
            from deepspeed.module_inject import SubParamLinearAllreduce, SubParamLinearLayer

            self.parts = 2
            self.pack = SubParamLinearLayer(self.pack, group, shape=((8, 4, 4), -1), partition_dim=0)
            self.join = SubParamLinearAllreduce(self.join, group, shape=(-1, (8, 4)), partition_dim=1, name="join")
            self.last = SubParamLinearLayer(self.last, group, shape=(3, -1))

    def forward(self, inputs):
        one, two, three = self.pack(inputs).split([size // self.parts for size in (8, 4, 4)], -1)
        found = self.join(torch.cat([one, two * torch.sigmoid(three)], -1).tanh())
        return self.last(inputs + found).pow(2).sum() / 10


def train_fused() -> tuple:
    deepspeed = programs.deepspeed()
    from deepspeed.module_inject.layers import SubParamLinearLayer

    from mizzen import zero

    model = Fused(dist.group.WORLD)
    model.last.register_forward_hook(lambda module, args, output: Gather(dist.group.WORLD)(output))
    config = {
        "train_batch_size": 4,
        "tensor_parallel_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    losses = []
    for step in range(STEPS):
        loss = engine(batch(step)[0])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    shapes = [tuple(layer.weight.shape) for layer in (model.pack, model.join, model.last)]
    values = {name: zero.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    gathered = [nn.Parameter(model.pack.weight.detach().clone()), nn.Parameter(model.pack.bias.detach().clone())]
    model.pack.gather_params(gathered)
    with pytest.raises(Exception, match="does not fit a layer of 12 and 6 features: its runs are 10 together") as told:
        SubParamLinearLayer(nn.Linear(WIDTH, 12), dist.group.WORLD, shape=((5, 5), -1))
    return losses, shapes, values, [each.detach() for each in gathered], type(told.value).__name__


def test_layers_of_several_matrices_in_one_train_as_whole_ones(world):
    model = Fused()
    rule, expected = torch.optim.SGD(model.parameters(), lr=0.01), []
    for step in range(STEPS):
        loss = model(batch(step)[0])
        rule.zero_grad()
        loss.backward()
        rule.step()
        expected.append(loss.item())
    for losses, shapes, values, gathered, _ in world(2).run(train_fused):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert shapes == [(8, WIDTH), (WIDTH, 6), (6, WIDTH)]
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(values[name], parameter.detach())
        torch.testing.assert_close(gathered, [model.pack.weight.detach(), model.pack.bias.detach()])
