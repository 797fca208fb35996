"""Engines over layers that are cut: random numbers, recomputation, compilation, zero.Init, loaders, and their page."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import mizzen
from mizzen import tensor
from mizzen.parallel.tensor.rng import differing
from parity.gpt import GPT, batch

PAGE = Path(__file__).parents[4] / "docs" / "tensor.md"
SAMPLES = 4


def settings(**keys) -> dict:
    return {
        "train_batch_size": SAMPLES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "progress": {"enabled": False},
        "seed": 1,
        **keys,
    }


class Dropping(nn.Module):
    """Keeps what it drops of an activation that all ranks have, and of one of which each has a part."""

    def __init__(self, group) -> None:
        super().__init__()
        self.layer = tensor.ColumnParallelLinear(4, 4, gather_output=False, tp_group=group)
        self.group, self.seen = group, []

    def forward(self, x):
        whole = nn.functional.dropout(x, 0.5)
        with differing(self.group):
            part = nn.functional.dropout(torch.ones(64), 0.5)
        self.seen.append((whole.ne(0), part.ne(0)))
        return self.layer(whole)[0].square().mean()


def masks():
    mpu = tensor.initialize_model_parallel(2)
    torch.manual_seed(1)
    model = Dropping(mpu.get_tensor_model_parallel_group())
    engine, *_ = mizzen.initialize(model=model, config=settings(), mpu=mpu)
    torch.manual_seed(torch.distributed.get_rank())  # the user's own stream is not asked
    for _ in range(2):
        engine.train_batch(iter([(torch.ones(16, 4),)]))
    return model.seen


def test_ranks_drop_alike_what_they_share_and_differently_what_is_cut(world):
    ranks = world(4).run(masks)
    for step in range(2):
        whole, part = ([seen[step][which] for seen in ranks] for which in (0, 1))
        assert torch.equal(whole[0], whole[1]) and torch.equal(whole[2], whole[3])
        assert not torch.equal(whole[0], whole[2]), "other samples"
        assert all(not torch.equal(part[a], part[b]) for a, b in ((0, 1), (2, 3), (0, 2), (1, 3)))
    assert not torch.equal(ranks[0][0][1], ranks[0][1][1]), "another step"


def losses(drop: float, sequence: bool, keys: dict, early: bool = False) -> list[float]:
    mpu = tensor.initialize_model_parallel(2)
    group = mpu.get_tensor_model_parallel_group()
    if early:
        with mizzen.zero.Init(config=settings(**keys), mpu=mpu):
            model = GPT(group, sequence=sequence, drop=drop)
    else:
        model = GPT(group, sequence=sequence, drop=drop)
    engine, *_ = mizzen.initialize(model=model, config=settings(**keys), mpu=mpu)
    ranks, rank = engine.dp_world_size, engine.get_data_parallel_rank()
    own = ([tuple(each.chunk(ranks)[rank] for each in batch(step, SAMPLES))] for step in range(3))
    return [engine.train_batch(iter(each)).loss for each in own]


@pytest.mark.parametrize("sequence", [False, True])
def test_blocks_that_are_computed_again_drop_what_they_have_dropped(world, sequence):
    again = {"activation_checkpointing": {"mode": "full"}}
    cases = [(0.3, sequence, {}), (0.3, sequence, again), (0.0, sequence, {})]
    kept, recomputed, without = (ranks[0] for ranks in world(2).each(losses, cases))
    assert kept == recomputed
    assert kept != without


@pytest.mark.wide  # other compiled blocks are in make test
def test_blocks_can_be_compiled(world):
    compiled = {"compile": {"enabled": True, "backend": "aot_eager"}}
    plain, traced = (world(2).run(losses, 0.0, True, keys, timeout=180)[0] for keys in ({}, compiled))
    assert traced == pytest.approx(plain, rel=1e-6)


def test_a_model_that_is_sharded_while_it_is_built_is_the_same(world):
    sharded = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    plain, early = world(4).each(losses, [(0.0, False, sharded, how) for how in (False, True)])
    assert plain == early


def loaded(how: str):
    mpu = tensor.initialize_model_parallel(2)
    torch.manual_seed(1)
    model = Dropping(mpu.get_tensor_model_parallel_group())
    data = list(torch.arange(24))
    given = {"training_data": data} if how == "training_data" else {}
    config = settings(train_batch_size=4)
    engine, _, loader, _ = mizzen.initialize(model=model, config=config, mpu=mpu, **given)
    loader = loader or engine.deepspeed_io(data)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("how", ["training_data", "deepspeed_io"])
def test_a_loader_gives_ranks_of_a_matrix_the_same_batch(world, how):
    ranks = world(4).run(loaded, how)
    assert ranks[0] == ranks[1] and ranks[2] == ranks[3]
    assert sorted(sample for batches in ranks[::2] for each in batches for sample in each) == list(range(24))


def page(code: str) -> float:
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    tokens = torch.arange(24).view(4, 6)
    return names["engine"].train_batch(iter([(tokens, tokens)])).loss


def test_the_page_trains(world):
    (code,) = re.findall(r"^```python\n(import torch\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    first, second = world(2).run(page, code)
    assert first == second and 10 < first < 12


class DroppingBlock(nn.Module):
    """After its last matrix backward needs nothing more: what computes it again stops there."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.5)

    def forward(self, hidden):
        return hidden + self.down(self.drop(self.up(hidden).relu()))


class DroppingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.blocks = nn.Dropout(0.5), nn.ModuleList(DroppingBlock() for _ in range(2))

    def forward(self, hidden):
        self.seen, hidden = self.before(hidden), self.before(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


def dropped(mode: str) -> tuple:
    """Losses and norms of some steps, with a call between that fails where activations are cut; what all ranks drop."""
    torch.manual_seed(1)
    keys = {"activation_checkpointing": {"mode": mode}, "tensor_parallel": {"autotp_size": 2}}
    engine, *_ = mizzen.initialize(model=(model := DroppingModel()), config=settings(**keys))
    found, given = [], torch.ones(4, 16)
    for step in range(4):
        report = engine.train_batch(iter([(given,)]))
        found.append((report.loss, report.grad_norm))
        if step == 1:
            handle = model.blocks[1].drop.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError), torch.no_grad():
                engine(given)
            handle.remove()
    with torch.no_grad():
        engine(given)
    return found, model.seen


def test_dropout_inside_of_what_is_cut_is_the_same_when_it_is_computed_again(world):
    """Where a repetition stops, and where a call fails, ranks go back to the random numbers that they have alike."""
    (kept, before), (_, other) = world(2).run(dropped, "off")
    assert torch.equal(before, other)
    for mode in ("full", "selective"):
        (again, here), (_, there) = world(2).run(dropped, mode)
        assert again == kept
        assert torch.equal(here, there) and torch.equal(here, before)
