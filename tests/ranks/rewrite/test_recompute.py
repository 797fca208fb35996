"""Computing blocks again changes no number, dropout included: losses, gradients and parameters, to the bit."""

from itertools import product

import pytest
import torch

import mizzen
from breadth import chosen, covering
from mizzen.rewrite.recompute import Recomputed
from ranks.rewrite.programs import build, config_of, tokens_of

STEPS = 3
MODES = {
    "full": {"mode": "full"},
    "every second": {"mode": "full", "every": 2},
    "selective": {"mode": "selective"},
    "host": {"mode": "full", "cpu_checkpointing": True},
    "selective host": {"mode": "selective", "cpu_checkpointing": True},
}


def train(stage: int, section: dict, loop: str = "open") -> tuple:
    model = build()
    names = list(model.state_dict())
    config = config_of(stage, 2, activation_checkpointing=section)
    engine, *_ = mizzen.initialize(model=model, config=config)
    recomputed = sum(isinstance(vars(module).get("forward"), Recomputed) for module in model.modules())
    losses, gradients = [], {}
    for step in range(STEPS):
        micros = [tokens_of(2 * step + half, engine.global_rank) for half in range(2)]
        if loop == "train_batch":
            losses.append(engine.train_batch(iter(micros)).loss)
            continue
        for number, tokens in enumerate(micros):
            engine.backward(engine(tokens))
            if step == STEPS - 1 and number == 1:
                parameters = model.named_parameters()
                gradients = {name: mizzen.zero.safe_get_full_grad(p).clone() for name, p in parameters}
            report = engine.step()
        losses.append(report.loss)
    values = {name: mizzen.zero.safe_get_full_fp32_param(p).clone() for name, p in model.named_parameters()}
    assert list(model.state_dict()) == names
    engine.destroy()
    assert not any("forward" in vars(module) for module in model.modules())
    return losses, gradients, values, recomputed


CASES = list(product(range(4), MODES))


@pytest.mark.in_parts
def test_nothing_changes_but_memory(world):
    cases = chosen(CASES, covering(CASES, 1))
    stages = sorted({stage for stage, _ in cases})
    sections = [(stage, {"mode": "off"}) for stage in stages] + [(stage, MODES[mode]) for stage, mode in cases]
    runs = world(2).each(train, sections, timeout=280)
    expected = dict(zip(stages, runs, strict=False))
    for (stage, mode), found in zip(cases, runs[len(stages) :], strict=True):
        check(expected[stage], found, mode)


def check(expected: list, found: list, mode: str) -> None:
    for (losses, gradients, values, none), (again, same_gradients, same_values, recomputed) in zip(
        expected, found, strict=True
    ):
        assert (none, recomputed) == (0, 2 if mode == "every second" else 4)
        assert again == losses
        assert gradients.keys() == same_gradients.keys() != set()
        assert all(torch.equal(gradients[name], same_gradients[name]) for name in gradients)
        assert all(torch.equal(values[name], same_values[name]) for name in values)


def test_ranks_drop_different_units(world):
    """Otherwise the test above would not notice a repetition with the numbers of another rank."""
    first, second = world(2).run(masks)
    assert not torch.equal(first, second)


def masks() -> torch.Tensor:
    model = build(dropout=0.5)
    engine, *_ = mizzen.initialize(model=model, config=config_of(0, 2, activation_checkpointing={"mode": "full"}))
    seen = []
    model.blocks[0].drop.register_forward_hook(lambda module, inputs, output: seen.append(output == 0))
    loss = engine(tokens_of(0))
    drawn = [mask.clone() for mask in seen]
    engine.backward(loss)
    repeated = seen[len(drawn) :]  # torch stops as soon as backward has what it needs
    assert repeated and all(map(torch.equal, repeated, drawn))
    return drawn[0]


@pytest.mark.in_parts
def test_a_whole_batch_at_once(world):
    cases = [(2, {"mode": mode}, "train_batch") for mode in ("off", *chosen(["full", "selective"], ["full"]))]
    expected, *others = (ranks[0][0] for ranks in world(2).each(train, cases))
    assert others == [expected] * len(others) != []


def give_to_a_later_engine() -> list[int]:
    """How many blocks are computed again: by the first engine, by a second with other keys, and by a third without."""
    model, counts = build(), []
    for section in ({"mode": "full"}, {"mode": "selective", "every": 2}, {"mode": "off"}):
        engine, *_ = mizzen.initialize(model=model, config=config_of(1, 2, activation_checkpointing=section))
        standing = [vars(block).get("forward") for block in model.blocks]
        assert not any(isinstance(each.__wrapped__, Recomputed) for each in standing if each is not None)
        counts.append(sum(each is not None for each in standing))
        for tokens in (tokens_of(0), tokens_of(1)):
            engine.backward(engine(tokens))
            report = engine.step()
        assert report.applied
    return counts


def test_a_model_that_goes_to_a_later_engine_is_changed_anew(world):
    assert world(2).run(give_to_a_later_engine) == [[4, 2, 0], [4, 2, 0]]


def configured_by_the_engine() -> tuple[bool, bool]:
    before = mizzen.checkpointing.is_configured()
    model = build()
    mizzen.initialize(model=model, config=config_of(0, 1, activation_checkpointing={"cpu_checkpointing": True}))
    return before, mizzen.checkpointing.is_configured()


def test_calls_of_checkpoint_follow_the_configuration(world):
    assert world(1).run(configured_by_the_engine) == [(False, True)]
