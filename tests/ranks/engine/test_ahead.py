"""A step that is launched before the host knows its norm: the same bits, and no trace where it is left out.

On a CPU the engine does not do it, since there is nothing to gain; here it is told to.
"""

import pytest
import torch

import mizzen
from parity.programs import Case, build, micro_batches


def start(case: Case, *, ahead: bool):
    engine, *_ = mizzen.initialize(model=build(case), config=case.config)
    engine.updater.goes_ahead = ahead
    return engine


def kept(engine) -> dict[str, torch.Tensor]:
    """Masters and states; a state that was made and not yet written to counts as none."""
    found = {}
    for number, (_, master) in enumerate(pair for store in engine.stores for pair in store.masters()):
        found[f"master {number}"] = master.clone()
        for key, value in engine.basic_optimizer.state.get(master, {}).items():
            if float(engine.basic_optimizer.state[master]["step"]) > 0:
                found[f"state {number} {key}"] = torch.as_tensor(value).clone()
    return found


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def train(stage: int, way: str, broken: tuple[int, ...], limit: float, ahead: bool) -> list:
    case = Case(stage, 2, samples=8, clip=limit)
    engine = start(case, ahead=ahead)
    armed = {"on": False}
    weight = dict(engine.module.named_parameters())["blocks.1.up.weight"]
    weight.register_hook(lambda g: g * float("nan") if armed["on"] else g)
    told = []
    for step in range(4):
        armed["on"] = step in broken and engine.global_rank == 1
        (tokens,) = micro_batches(case, step, engine.global_rank)
        if way == "counted":
            report = engine.train_batch(iter([(tokens, tokens)]), lambda out, _: (out * 3, torch.tensor(3.0)))
        else:
            loss = engine(tokens)
            if way == "bare":
                loss.backward()
            else:
                engine.backward(loss)
            report = engine.step()
        told.append((report.applied, report.grad_norm, report.reason))
    return [told, kept(engine)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("way", "broken"), [("usual", ()), ("usual", (0, 2)), ("bare", (1,)), ("counted", (3,))])
def test_the_bits_are_the_same(world, stage, way, broken):
    plain, ahead = (world(2).run(train, stage, way, broken, 0.1, how) for how in (False, True))
    for (told, state), (told_ahead, state_ahead) in zip(plain, ahead, strict=True):
        assert [each[0] for each in told] == [step not in broken for step in range(4)]
        assert str(told_ahead) == str(told)
        assert is_same(state_ahead, state)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_limit_that_is_met_in_some_steps_only(world, stage):
    told, _ = world(2).run(train, stage, "usual", (), 0.0, False)[0]
    limit = sorted(norm for _, norm, _ in told)[2] - 1e-3
    plain, ahead = (world(2).run(train, stage, "usual", (), limit, how) for how in (False, True))
    norms = [norm for _, norm, _ in plain[0][0]]
    assert min(norms) < limit < max(norms)
    for (told, state), (told_ahead, state_ahead) in zip(plain, ahead, strict=True):
        assert told_ahead == told
        assert is_same(state_ahead, state)


def one_rank_is_idle(stage: int, ahead: bool) -> list:
    """Rank 0 computes nothing in the first step, and so guesses wrong what the others have seen."""
    case = Case(stage, 2, samples=8)
    engine = start(case, ahead=ahead)
    for step in range(2):
        (tokens,) = micro_batches(case, step, engine.global_rank)
        if step or engine.global_rank:
            engine.backward(engine(tokens))
        engine.step()
    return [engine.last_step.grad_norm, kept(engine)]


def test_a_rank_that_has_seen_something_else_takes_the_step_after_all(world):
    plain, ahead = (world(2).run(one_rank_is_idle, 0, way) for way in (False, True))
    for (norm, state), (norm_ahead, state_ahead) in zip(plain, ahead, strict=True):
        assert norm_ahead == norm
        assert is_same(state_ahead, state)


def with_a_hook(kind: str) -> tuple[int, int]:
    case = Case(2, 2, samples=8)
    engine = start(case, ahead=True)
    calls = []
    getattr(engine.basic_optimizer, f"register_step_{kind}_hook")(lambda *_: calls.append(1))
    engine.module.norm.weight.register_hook(lambda g: g * float("inf") if not calls and not engine.skipped_steps else g)
    for step in range(3):
        engine.backward(engine(micro_batches(case, step, engine.global_rank)[0]))
        engine.step()
    return len(calls), engine.global_steps


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_are_called_for_steps_that_are_taken(world, kind):
    assert world(2).run(with_a_hook, kind) == [(2, 2)] * 2
