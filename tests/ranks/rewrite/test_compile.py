"""Compiled blocks on ranks: the numbers of eager ones at every stage, with and without recomputation."""

import pytest
import torch
from torch._dynamo.utils import counters

import mizzen
from breadth import chosen
from mizzen.errors import NotBuilt, PlanError, UsageError
from ranks.rewrite.programs import build, config_of, tokens_of

STEPS = 2


def train(stage: int, recompute: str = "off", way: str = "off") -> tuple:
    """Losses, master values and what was compiled; by the configuration or by a call."""
    model = build()
    names = list(model.state_dict())
    options = {"backend": "aot_eager", "fullgraph": True}
    keys = {"activation_checkpointing": {"mode": recompute}}
    if way == "configuration":
        keys["compile"] = {"enabled": True, **options}
    engine, *_ = mizzen.initialize(model=model, config=config_of(stage, 2, **keys))
    if way == "call":
        assert not engine.is_compiled
        engine.compile(options.pop("backend"), options)
    losses = []
    for step in range(STEPS):
        for half in range(2):
            engine.backward(engine(tokens_of(2 * step + half, engine.global_rank)))
            report = engine.step()
        losses.append(report.loss)
    values = {name: mizzen.zero.safe_get_full_fp32_param(p).clone() for name, p in model.named_parameters()}
    assert list(model.state_dict()) == names
    assert engine.is_compiled == (way != "off")
    engine.destroy()
    return losses, values, counters["stats"]["unique_graphs"]


EVERY = [
    (0, "off", "configuration"),
    (1, "full", "configuration"),
    (2, "off", "configuration"),
    (2, "selective", "configuration"),
    (2, "full", "call"),
    (3, "off", "configuration"),
    (3, "full", "configuration"),
    (3, "off", "call"),
]
CASES = chosen(EVERY, [EVERY[3], EVERY[7]])


def train_all() -> list[tuple]:
    """All cases in one process, because loading the compiler takes longer than they do; each with its eager twin."""
    found = []
    for stage, recompute, way in CASES:
        torch.compiler.reset()
        counters.clear()
        found.append((train(stage), train(stage, recompute, way)))
    return found


@pytest.fixture(scope="module")
def trained(world):
    return world(2).run(train_all, timeout=280)


@pytest.mark.in_parts
@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: "-".join(map(str, CASES[case])))
def test_the_numbers_of_eager_blocks(trained, case):
    for cases in trained:
        (losses, values, none), (again, same, graphs) = cases[case]
        assert (none, graphs) == (0, 1)
        assert again == pytest.approx(losses, rel=1e-6)
        assert all(torch.allclose(values[name], same[name], rtol=1e-5, atol=1e-6) for name in values)


def lengths_in_turn() -> list[int]:
    """How many graphs there are after each of 50 steps, with two lengths."""
    config = config_of(2, 2, compile={"enabled": True, "backend": "aot_eager"}, gradient_accumulation_steps=1)
    engine, *_ = mizzen.initialize(model=build(), config=config)
    graphs = []
    for step in range(50):
        engine.backward(engine(tokens_of(step, engine.global_rank, length=(12, 17)[step % 2])))
        assert engine.step().applied
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


@pytest.mark.wide
def test_nothing_is_compiled_after_both_lengths_were_seen(world):
    for graphs in world(2).run(lengths_in_turn, timeout=180):
        assert graphs[2:] == [graphs[1]] * 48
        assert graphs[0] == 1 and graphs[1] <= 3


def refusals() -> list[str]:
    found = []
    recompute = {"mode": "full", "cpu_checkpointing": True}
    uses = {
        "plan": lambda: mizzen.initialize(
            model=build(), config=config_of(0, 1, activation_checkpointing=recompute, compile={"enabled": True})
        ),
        "call": lambda: mizzen.initialize(
            model=build(), config=config_of(0, 1, activation_checkpointing={"mode": "full"})
        )[0].compile("eager"),
        "schedule": lambda: mizzen.initialize(model=build(), config=config_of(0, 1))[0].compile(schedule=[]),
        "autograd": lambda: mizzen.initialize(model=build(), config=config_of(0, 1))[0].compile(
            compiled_autograd_enabled=True
        ),
        "pass": lambda: mizzen.initialize(model=build(), config=config_of(0, 1))[0].register_compile_pass("mine", None),
    }
    for use in uses.values():
        with pytest.raises((PlanError, UsageError)) as caught:
            use()
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


def test_what_is_refused(world):
    (found,) = world(1).run(refusals)
    assert [line.split(":")[0] for line in found] == ["PlanError", "UsageError", *["NotBuilt"] * 3]
    assert "inputs cannot rest in host memory" in found[0]
    assert "the backend eager does not promise" in found[1]
    assert issubclass(NotBuilt, UsageError)
