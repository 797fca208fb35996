"""A step that is launched before the host knows its norm: the same bits, and no trace where it is left out.

On a CPU the engine does not do it, since there is nothing to gain; here it is told to.
"""

import pytest
import torch
from torch.optim import optimizer

import mizzen
from breadth import choice
from mizzen.engine.update import STEADY
from parity.programs import Case, build, micro_batches


def start(case: Case, *, ahead: bool):
    engine, *_ = mizzen.initialize(model=build(case), config=case.config)
    engine.updater.goes_ahead = ahead
    return engine


def kept(engine) -> dict[str, torch.Tensor]:
    """Masters and states; a state that was made and not yet written to counts as none."""
    found = {}
    for number, (_, master) in enumerate(pair for store in engine.stores for pair in store.contents.masters):
        found[f"master {number}"] = master.clone()
        for key, value in engine.basic_optimizer.state.get(master, {}).items():
            if float(engine.basic_optimizer.state[master]["step"]) > 0:
                found[f"state {number} {key}"] = torch.as_tensor(value).clone()
    return found


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def train(stage: int, way: str, broken: tuple[int, ...], limit: float, ahead: bool, unlimited: int = 0) -> list:
    case = Case(stage, 2, samples=8, clip=limit)
    engine = start(case, ahead=ahead)
    armed = {"on": False}
    weight = dict(engine.module.named_parameters())["blocks.1.up.weight"]
    weight.register_hook(lambda g: g * float("nan") if armed["on"] else g)
    told = []
    for step in range(unlimited + 4):
        engine.updater.max_norm = limit if step >= unlimited else 0.0
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
    plain, ahead = world(2).each(train, [(stage, way, broken, 0.1, how) for how in (False, True)])
    for (told, state), (told_ahead, state_ahead) in zip(plain, ahead, strict=True):
        assert [each[0] for each in told] == [step not in broken for step in range(4)]
        assert str(told_ahead) == str(told)
        assert is_same(state_ahead, state)


@pytest.mark.parametrize("unlimited", choice([0, STEADY], [STEADY]))
@pytest.mark.parametrize("stage", choice([0, 3], [3]))
def test_a_limit_that_is_met_in_some_steps_only(world, stage, unlimited):
    told, _ = world(2).run(train, stage, "usual", (), 0.0, False, unlimited)[0]
    limit = sorted(norm for _, norm, _ in told[unlimited:])[2] - 1e-3
    plain, ahead = world(2).each(train, [(stage, "usual", (), limit, how, unlimited) for how in (False, True)])
    norms = [norm for _, norm, _ in plain[0][0][unlimited:]]
    assert min(norms) < limit < max(norms)
    for (told, state), (told_ahead, state_ahead) in zip(plain, ahead, strict=True):
        assert told_ahead == told
        assert is_same(state_ahead, state)


def one_rank_is_idle(ahead: bool, is_bare: bool) -> list:
    """Rank 0 computes nothing in the first step, and so guesses wrong what the others have seen."""
    case = Case(0, 2, 2, samples=8)
    engine = start(case, ahead=ahead)
    for step in range(2):
        for tokens in micro_batches(case, step, engine.global_rank):
            if step or engine.global_rank:
                loss = engine(tokens)
                engine.scale(loss).backward() if is_bare else engine.backward(loss)
            engine.step()
    return [engine.last_step.grad_norm, kept(engine)]


def test_a_rank_that_has_seen_something_else_takes_the_step_after_all(world):
    runs = world(2).each(one_rank_is_idle, [(ahead, is_bare) for is_bare in (False, True) for ahead in (False, True)])
    norm, state = runs[0][0]
    for run in runs:
        for other_norm, other_state in run:
            assert other_norm == norm
            assert is_same(other_state, state)


def with_a_hook(kind: str, is_global: bool) -> tuple[int, int]:
    case = Case(2, 2, samples=8)
    engine = start(case, ahead=True)
    calls = []
    place, name = (optimizer, "optimizer_step") if is_global else (engine.basic_optimizer, "step")
    handle = getattr(place, f"register_{name}_{kind}_hook")(lambda *_: calls.append(1))
    engine.module.norm.weight.register_hook(lambda g: g * float("inf") if not calls and not engine.skipped_steps else g)
    for step in range(3):
        engine.backward(engine(micro_batches(case, step, engine.global_rank)[0]))
        engine.step()
    handle.remove()
    return len(calls), engine.global_steps


@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_are_called_for_steps_that_are_taken(world, kind, is_global):
    assert world(2).run(with_a_hook, kind, is_global) == [(2, 2)] * 2


def with_a_hook_here_only(stage: int, ahead: bool, family: str, dtype: str) -> list:
    """Rank 1 gets a hook after two steps: it cannot go ahead with the third, which is broken, nor with the fourth."""
    case = Case(stage, 2, samples=8, family=family, dtype=dtype)
    engine = start(case, ahead=ahead)
    armed = {"on": False}
    dict(engine.module.named_parameters())["norm.weight"].register_hook(lambda g: g / 0 if armed["on"] else g)
    told = []
    for step in range(5):
        if step == 2 and engine.global_rank:
            engine.basic_optimizer.register_step_post_hook(lambda *_: None)
        armed["on"] = step == 2
        engine.backward(engine(micro_batches(case, step, engine.global_rank)[0]))
        told.append(engine.step().applied)
    values = engine.module.state_dict() if stage == 1 else {}  # at stage 3 masters are the values
    return [told, kept(engine) | {name: value.clone() for name, value in values.items()}]


@pytest.mark.parametrize(
    ("stage", "family"), choice([(1, "alone"), (3, "alone"), (3, "loco")], [(1, "alone"), (3, "loco")])
)
@pytest.mark.parametrize("dtype", ["fp32", "low"])
def test_a_hook_on_one_rank_only(world, stage, family, dtype):
    plain, ahead = world(2).each(with_a_hook_here_only, [(stage, way, family, dtype) for way in (False, True)])
    for (told, state), (told_ahead, state_ahead) in zip(plain, ahead, strict=True):
        assert told_ahead == told == [True, True, False, True, True]
        assert is_same(state_ahead, state)


def written_back(ahead: bool) -> list[str]:
    """What happens in each step, in order: values are sent out (p) and numbers read (r)."""
    case = Case(2, 2, samples=8)
    engine = start(case, ahead=ahead)
    (store,), seen = engine.stores, []
    write_back, agree = store.write_back, engine.updater.stopping.agree
    store.write_back = lambda: (seen.append("p"), write_back())
    engine.updater.stopping.agree = lambda asked: (seen.append("r"), agree(asked))
    for step in range(3):
        engine.backward(engine(micro_batches(case, step, engine.global_rank)[0]))
        engine.step()
    return seen


def test_new_values_are_sent_before_the_norm_is_read_once_all_ranks_are_known_to_go_ahead(world):
    ahead, after = world(2).each(written_back, [(True,), (False,)])
    assert ahead == [["r", "p", "p", "r", "p", "r"]] * 2
    assert after == [["r", "p"] * 3] * 2


def kinds_of_losses() -> str:
    case = Case(0, 2, samples=8)
    engine = start(case, ahead=False)
    (tokens,) = micro_batches(case, 0, engine.global_rank)

    def loss(out, _):
        return (out, torch.tensor(1.0)) if engine.global_rank else out

    with pytest.raises(mizzen.errors.UsageError) as found:
        engine.train_batch(iter([(tokens, tokens)]), loss)
    return str(found.value)


def test_ranks_whose_losses_are_of_different_kinds_are_told(world):
    assert all("as (sum, count) and others as one number" in said for said in world(2).run(kinds_of_losses))


def some_are_scaled(ahead: bool) -> str:
    case = Case(0, 2, 2, samples=8)
    engine = start(case, ahead=ahead)
    for tokens in micro_batches(case, 0, engine.global_rank):
        loss = engine(tokens)
        (engine.scale(loss) if engine.global_rank else loss).backward()
    engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(mizzen.errors.UsageError) as found:
        engine.step()
    return str(found.value)


@pytest.mark.parametrize("ahead", [False, True])
def test_ranks_of_which_some_scale_their_losses_are_told(world, ahead):
    assert all("engine.scale(loss).backward() in this step" in said for said in world(2).run(some_are_scaled, ahead))
