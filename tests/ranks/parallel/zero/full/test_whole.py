"""Rules that need whole parameters at stage 3: the bits of stage 2, with nothing whole between two steps."""

import pytest
import torch
from torch.optim import Optimizer

import mizzen
from mizzen.errors import UsageError
from ranks.parallel.zero.full.models import MODELS, config, rows, start, train, values_of

MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "weight_decay": 0.1}}, "deterministic": True}
ADAFACTOR = {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2}}, "deterministic": True}
BF16 = {"bf16": {"enabled": True}}


class Centred(Optimizer):
    """A rule of a user's own that looks at all of a parameter: gradients have no mean."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad - parameter.grad.mean(), alpha=group["lr"])


def own_rule(kind, stage, **changes):
    torch.manual_seed(3)
    model = MODELS[kind]()
    keys = config(stage, torch.distributed.get_world_size(), zero_allow_untested_optimizer=True, **changes)
    del keys["optimizer"]
    engine = mizzen.initialize(model=model, optimizer=Centred(model.parameters()), config=keys)[0]
    for step in range(3):
        engine.backward(engine(rows(step, engine.global_rank)))
        assert engine.step().applied
    return values_of(engine)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("kind", "ranks", "keys"),
    [
        ("Odd", 3, MUON),
        ("TiedBlocks", 2, MUON | {"zero": {"stage3_param_persistence_threshold": 50}}),
        ("TiedBlocks", 2, ADAFACTOR),
    ],
    ids=["uneven", "with small ones", "Adafactor"],
)
def test_the_bits_are_those_of_stage_2(world, kind, ranks, keys):
    (expected, *_), found = world(ranks).each(train, [(kind, 2), (kind, 3)], steps=3, **keys)
    for losses, norms, values in found:
        assert (losses, norms) == expected[:2]
        assert_same(values, expected[2])


def test_a_rule_of_the_users_own_sees_whole_parameters(world):
    full, flat = world(2).each(own_rule, [("Base", 3), ("Base", 2)])
    assert_same(full[1], flat[0])


def train_with_muon(zero):
    return train("Base", 3, zero=zero, **MUON)


def test_copies_step_alike(world):
    runs, (expected, *_) = world(4).each(train_with_muon, [({"mics_shard_size": 2},), ({},)])
    for losses, _, values in runs:
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert_same(values, runs[0][2])


def at_rest():
    """What the optimizer holds between steps; and states that only their owners have, read by everybody."""
    engine = start("Base", 3, **MUON, **BF16)
    for step in range(2):
        engine.backward(engine(rows(step, engine.global_rank).bfloat16()))
        engine.step()
    muon = [group for group in engine.basic_optimizer.param_groups if group["use_muon"]]
    stepped = [parameter for group in muon for parameter in group["params"]]
    owned = sum(engine.basic_optimizer.state[each]["momentum_buffer"].numel() for each in stepped)
    get, up = mizzen.zero.safe_get_full_optimizer_state, engine.module.blocks[1].up.weight
    momentum = get(up, "momentum_buffer")
    mizzen.zero.safe_set_full_optimizer_state(up, torch.full_like(momentum, 0.25), "momentum_buffer")
    assert torch.equal(get(up, "momentum_buffer"), torch.full_like(momentum, 0.25))
    with pytest.raises(UsageError, match="keeps no state 'nothing'; it keeps exp_avg, exp_avg_sq, momentum_buffer"):
        get(up, "nothing")
    return [each.numel() for each in stepped], owned, momentum


def test_an_owner_keeps_states_and_nothing_else(world):
    (sizes, owned, momentum), (other_sizes, others, same) = world(2).run(at_rest)
    assert not any(sizes) and not any(other_sizes)
    assert momentum.shape == (16, 8) and momentum.any()
    assert torch.equal(momentum, same)
    total = 3 * 2 * 16 * 8 + 4 * 8 + 8
    assert owned + others == total
    assert abs(owned - others) <= 16 * 8


def nothing_owned():
    """More ranks than matrices: a rank that owns none takes part in everything."""
    torch.manual_seed(0)
    engine = start(torch.nn.Sequential(torch.nn.Linear(6, 5, bias=False)), 3, **MUON)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 6)).square().mean())
        assert engine.step().applied
    weight = engine.module[0].weight
    owned = sum(len(group["params"]) for group in engine.basic_optimizer.param_groups)
    own = mizzen.zero.safe_get_local_optimizer_state(weight, "momentum_buffer")
    mizzen.zero.safe_set_local_optimizer_state(weight, 2 * own, "momentum_buffer")
    return owned, own.numel(), mizzen.zero.safe_get_full_optimizer_state(weight, "momentum_buffer")


def test_a_rank_may_own_nothing(world):
    (one, held, momentum), (other, nothing, same) = world(2).run(nothing_owned)
    assert (one, other) == (1, 0)
    assert (held, nothing) == (30, 0)
    assert torch.equal(momentum, same) and momentum.any()
