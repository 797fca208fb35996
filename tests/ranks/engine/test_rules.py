"""Optimizers whose rules need more than elements, through the engine."""

import pytest
import torch
from torch import nn

import mizzen
from breadth import FULL
from mizzen.errors import ConfigError
from mizzen.zero import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_optimizer_state


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(13, 8)
        self.hidden = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.wide = nn.Linear(8, 24)
        self.lm_head = nn.Linear(24, 13, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.hidden:
            hidden = hidden + layer(hidden).tanh()
        logits = self.lm_head(self.wide(hidden).tanh())
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Spectral(torch.optim.Optimizer):
    """A rule of the user's own, which looks at the shape of every parameter."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = parameter.grad.reshape(len(parameter), -1).norm(dim=1).mean() if parameter.dim() else 1.0
                parameter.sub_(parameter.grad / (1 + scale), alpha=group["lr"])


def config(stage, optimizer=None, **keys):
    named = {"optimizer": {"type": optimizer, "params": {"lr": 0.02}}} if optimizer else {}
    return {"train_batch_size": 4, "zero_optimization": {"stage": stage}, "seed": 1, **named, **keys}


def tokens(engine, step):
    generator = torch.Generator().manual_seed(step)
    mine = 4 // engine.world_size
    return torch.randint(13, (4, 6), generator=generator)[engine.global_rank * mine : (engine.global_rank + 1) * mine]


def train(stage, rule, keys):
    model = Language()
    named = rule if isinstance(rule, str) else None
    engine, *_ = mizzen.initialize(
        model=model, config=config(stage, named, **keys), optimizer=None if named else rule, model_parameters=None
    )
    losses = []
    for step in range(4):
        engine.backward(engine(tokens(engine, step)))
        losses.append(engine.step().loss)
    values = {name: safe_get_full_fp32_param(p).cpu() for name, p in model.named_parameters()}
    owned = sum(tensor.numel() for store in engine.stores for _, tensor in store.contents.masters)
    return losses, values, owned


ALLOWED = {"zero_allow_untested_optimizer": True}
RULES = [("Muon", {}), ("Adafactor", {}), ("Lamb", {}), (Spectral, ALLOWED), ("Muon", {"bf16": {"enabled": True}})]


@pytest.mark.parametrize(("rule", "keys"), RULES, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 2), (2, 2), (2, 4)])
def test_every_stage_trains_as_one_process(world, rule, keys, stage, ranks):
    losses, values, total = world(1).run(train, 0, rule, keys)[0]
    shares = []
    for found, theirs, owned in world(ranks).run(train, stage, rule, keys):
        assert found == pytest.approx(losses, rel=2e-5 if not keys or keys == ALLOWED else 2e-2)
        for name, value in values.items():
            torch.testing.assert_close(theirs[name], value, rtol=1e-3, atol=1e-4 if "bf16" not in keys else 5e-3)
        shares.append(owned)
    if stage and ranks == 2:
        assert max(shares) < 0.75 * total  # matrices have one owner each, and still nobody has most of them


def states(stage):
    model = Language()
    engine, *_ = mizzen.initialize(model=model, config=config(stage, "Muon"))
    engine.backward(engine(tokens(engine, 0)))
    engine.step()
    weight = model.hidden[2].weight
    before = safe_get_full_optimizer_state(weight, "momentum_buffer")
    safe_set_full_optimizer_state(weight, torch.full((8, 8), 2.0), "momentum_buffer")
    after = safe_get_full_optimizer_state(weight, "momentum_buffer")
    other = safe_get_full_optimizer_state(model.embed.weight, "exp_avg")
    return before, after, other


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_states_of_whole_matrices_are_read_and_written_by_name(world, stage):
    expected = world(1).run(states, 0)[0][0]
    for before, after, other in world(2).run(states, stage):
        torch.testing.assert_close(before, expected, rtol=1e-4, atol=1e-6)
        assert before.any()
        assert torch.equal(after, torch.full((8, 8), 2.0))
        assert other.shape == (13, 8)


def refused(stage):
    with pytest.raises(ConfigError) as caught:
        mizzen.initialize(model=Language(), config=config(stage), optimizer=Spectral)
    return str(caught.value)


def test_an_unknown_rule_is_not_shared_out_unasked(world):
    for message in world(2).run(refused, 1):
        assert message == (
            "zero_allow_untested_optimizer: Spectral is not known to treat each parameter by itself, and at stage 1 "
            "every rank steps only its share of them; set this key to true if it does, or use stage 0"
        )


def test_at_stage_0_any_rule_works(world):
    losses = world(1).run(train, 0, Spectral, {})[0][0]
    assert world(2).run(train, 0, Spectral, {})[1][0] == pytest.approx(losses, rel=1e-5)


def low_bit(stage, is_compiled):
    if not is_compiled:
        torch.compiler.set_stance("force_eager")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    engine, *_ = mizzen.initialize(model=model, config=config(stage, "AdamW8bit"))
    kinds, losses = set(), []
    for step in range(8):
        inputs = torch.randn(4 // engine.world_size, 64, generator=torch.Generator().manual_seed(step % 2))
        engine.backward((engine(inputs) - inputs).square().mean())
        losses.append(engine.step().loss)
    for state in engine.basic_optimizer.state.values():
        kinds |= {type(value).__name__ for key, value in state.items() if key != "step"}
    return losses, kinds


# torchao compiles its step, which takes a minute; compiled or not, its rule and its states are the same.
@pytest.mark.parametrize("is_compiled", [False, True] if FULL else [False])
def test_states_in_eight_bits(world, is_compiled):
    pytest.importorskip("torchao")
    for ranks in world(2).each(low_bit, [(stage, is_compiled) for stage in (0, 2)], timeout=300):
        for losses, kinds in ranks:
            assert kinds == {"OptimState8bit"}
            assert losses[-1] < losses[0]
