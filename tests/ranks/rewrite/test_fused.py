"""Fused operations on ranks: the losses, norms and weights of the model's own code, under every plan."""

import pytest
import torch

import mizzen
from breadth import FULL, chosen
from mizzen.errors import UsageError
from mizzen.rewrite.forward import ReplacedForward
from ranks.rewrite.llama import ALL, batch_of, build, train
from ranks.rewrite.programs import config_of

HEAD = {"head_loss": True, "head_chunk": 7}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 512.0}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bf16"}}
RECOMPUTE = {"activation_checkpointing": {"mode": "full"}}
CASES = {
    "head": (HEAD, {}, {}),
    "all": (ALL, {}, {}),
    "tied": (ALL, {}, {"tied": True}),
    "frozen": (ALL, {}, {"frozen": True}),
    "recomputed": (ALL, RECOMPUTE, {}),
    "selective": (ALL, {"activation_checkpointing": {"mode": "selective"}}, {"tied": True}),
    "bf16": (ALL, BF16, {}),
    "fp16": (ALL, FP16, {"tied": True}),
    "autocast": (ALL, AUTOCAST, {}),
}
EVERY = [(name, stage) for name in CASES for stage in ((0, 1, 2, 3) if name in ("all", "tied") or FULL else (2,))]
"""Cases and stages; all of them with FULL=1."""
WHERE = chosen(EVERY, [("all", 1), ("all", 3), ("tied", 0), ("bf16", 2)])
BOUND = {"bf16": 1e-2, "fp16": 2e-3, "autocast": 1e-2}


def compare() -> dict:
    """All cases in one process, each with its plain twin."""
    return {
        (name, stage): (train(stage, **more, **sections), train(stage, **more, **sections, fused=fused))
        for name, stage in WHERE
        for fused, sections, more in [CASES[name]]
    }


@pytest.fixture(scope="module")
def compared(world):
    return world(2).run(compare, timeout=280)


@pytest.mark.in_parts
@pytest.mark.parametrize(("name", "stage"), WHERE)
def test_the_numbers_of_the_models_own_code(compared, name, stage):
    bound = BOUND.get(name, 1e-5)
    for rank in compared:
        (losses, norms, values), (same_losses, same_norms, same_values) = rank[name, stage]
        assert same_losses == pytest.approx(losses, rel=bound)
        assert same_norms == pytest.approx(norms, rel=3 * bound)
        for key, value in values.items():
            # In the mean: where a gradient is next to nothing, Adam turns its last bit into a whole step.
            assert (value - same_values[key]).abs().mean() < bound / 2, key


def compiled() -> list[tuple]:
    torch.compiler.reset()
    sections = {"compile": {"enabled": True, "backend": "aot_eager"}}
    return [train(2), train(2, **sections, fused=ALL), train(2, **sections, **RECOMPUTE, fused=ALL)]


@pytest.mark.wide
def test_compiled_blocks_with_a_fused_head(world):
    for expected, *others in world(2).run(compiled, timeout=200):
        for losses, norms, _ in others:
            assert losses == pytest.approx(expected[0], rel=1e-5)
            assert norms == pytest.approx(expected[1], rel=3e-5)


def read_logits(stage: int) -> tuple:
    model, plain = build(), build()
    engine, *_ = mizzen.initialize(model=model, config=config_of(stage, 2, fused=ALL, gradient_accumulation_steps=1))
    batch = batch_of(0, engine.global_rank)
    output = engine(**batch)
    difference = (output.logits.detach() - plain(**batch).logits).abs().max().item()
    engine.backward(output.loss)
    kept = engine(**batch)
    engine.step()
    with pytest.raises(UsageError, match="the head has changed since the forward|outside of a forward pass"):
        kept.logits.sum()
    engine.eval()
    with torch.no_grad():
        evaluated = engine(**batch)
        agree = torch.equal(evaluated.logits.argmax(-1), model(input_ids=batch["input_ids"]).logits.argmax(-1))
    return difference, bool(agree)


@pytest.mark.parametrize("stage", [1, 3])
def test_logits_come_when_they_are_read(world, stage):
    for difference, agree in world(2).run(read_logits, stage):
        assert difference < 1e-5
        assert agree


def loss_of_logits(fused: dict) -> tuple:
    """A loss of the user's own, on the logits alone."""
    model = build()
    engine, *_ = mizzen.initialize(model=model, config=config_of(3, 2, fused=fused, gradient_accumulation_steps=1))
    told = []
    for number in range(3):
        loss = engine(**batch_of(number, engine.global_rank)).logits.float().logsumexp(-1).square().mean()
        engine.backward(loss)
        told.append((loss.item(), engine.step().grad_norm))
    return told


def test_a_loss_of_late_logits_reaches_sharded_parameters(world):
    for plain, fused in zip(*world(2).each(loss_of_logits, [({},), (ALL,)]), strict=True):
        assert fused == [pytest.approx(each, rel=1e-5) for each in plain]


def give_to_a_later_engine() -> list[int]:
    """How many modules have another forward: by the first engine, by a second, by a third without."""
    model, counts = build(), []
    for section in (ALL, HEAD, {}):
        engine, *_ = mizzen.initialize(model=model, config=config_of(1, 2, fused=section))
        standing = [vars(module).get("forward") for module in model.modules()]
        standing = [each for each in standing if isinstance(each, ReplacedForward)]
        assert not any(isinstance(each.__wrapped__, ReplacedForward) for each in standing)
        counts.append(len(standing))
        for half in range(2):
            engine.backward(engine(**batch_of(half, engine.global_rank)).loss)
            report = engine.step()
        assert report.applied
    return counts


def test_a_model_that_goes_to_a_later_engine_is_changed_anew(world):
    assert world(2).run(give_to_a_later_engine) == [[10, 1, 0]] * 2
