"""Loss scaling on ranks: what a step does when gradients overflow, and what users see of the scale."""

import math
from dataclasses import dataclass

import pytest
import torch

import mizzen
from mizzen.errors import StepError, UsageError
from mizzen.precision.scaler import LossScaler, Scaling
from parity.programs import Case, build, groups, micro_batches
from ranks.engine.test_training import snapshot

RULES = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 2}


@dataclass(frozen=True)
class Run:
    """One engine with a scaled loss, and the (step, rank) pairs at which a gradient overflows."""

    stage: int = 0
    world: int = 1
    accumulation: int = 1
    overflows: tuple = ()
    autocast: bool = False

    @property
    def case(self) -> Case:
        return Case(self.stage, self.world, self.accumulation, 0.5, samples=8)

    def start(self, model=None, fp16=None, **extra):
        """The engine. Under autocast the same rules hold, and only the switch is another."""
        fp16 = {**RULES, **(fp16 or {})}
        keys = {"fp16": fp16}
        if self.autocast:
            keys = {"fp16": {**fp16, "enabled": False}, "torch_autocast": {"enabled": True, "dtype": "fp16"}}
        engine, *_ = mizzen.initialize(model=model or build(self.case), config=self.case.config | keys | extra)
        return engine


def backwards(engine, run, step):
    for number, tokens in enumerate(micro_batches(run.case, step, engine.global_rank)):
        if number:
            engine.step()
        engine.backward(engine(tokens))


def trace(run: Run, steps: int) -> list[tuple]:
    """What happened in each step: (applied, scale of this step, scale of the next, skipped so far)."""
    warmup = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 50, "warmup_type": "linear"}
    engine = run.start(scheduler={"type": "WarmupLR", "params": warmup})
    armed = {"on": False}
    engine.module.blocks[1].up.weight.register_hook(lambda g: g * math.inf if armed["on"] else g)
    found = []
    for step in range(steps):
        armed["on"] = (step, engine.global_rank) in run.overflows
        before, schedule = snapshot(engine), engine.lr_scheduler.state_dict()
        backwards(engine, run, step)
        report = engine.step()
        after = snapshot(engine)
        changed = [key for key in before if not torch.equal(before[key], after[key])]
        assert bool(changed) == (engine.lr_scheduler.state_dict() != schedule) == report.applied
        assert engine.optimizer.overflow != report.applied
        assert report.applied or "blocks.1.up.weight" in report.reason
        assert engine.loss_scale() == engine.optimizer.loss_scale == engine.optimizer.cur_scale
        found.append((report.applied, report.loss_scale, engine.loss_scale(), engine.skipped_steps))
    assert engine.global_steps == sum(applied for applied, *_ in found)
    return found


def expected(steps: int, skipped: set) -> list[tuple]:
    """The same by the rules alone."""
    scaler = LossScaler(Scaling(256.0, is_dynamic=True, window=3, hysteresis=2))
    found, count = [], 0
    for step in range(steps):
        used = scaler.scale
        if step in skipped:
            count += 1
            scaler.skipped("")
        else:
            scaler.taken()
        found.append((step not in skipped, used, scaler.scale, count))
    return found


STEPS = 9
OVERFLOWS = ((1, 0), (2, 0), (3, 0), (8, 0))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("stage", "size", "accumulation"), [(0, 1, 1), (2, 1, 2), (0, 2, 2), (1, 2, 1), (2, 2, 2)])
def test_an_overflow_skips_on_all_ranks_and_the_scale_moves_by_the_rules(world, stage, size, accumulation, autocast):
    run = Run(stage, size, accumulation, OVERFLOWS, autocast)
    rules = expected(STEPS, {step for step, _ in OVERFLOWS})
    assert [scale for *_, scale, _ in rules] == [256, 256, 128, 64, 64, 64, 128, 128, 128]
    assert world(size).run(trace, run, STEPS) == [rules] * size


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_it_does_not_matter_which_rank_overflows(world, stage):
    run = Run(stage, 2, 1, ((0, 1), (2, 1)))
    assert world(2).run(trace, run, 4) == [expected(4, {0, 2})] * 2


def steps_of(run: Run, scale: float) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    engine = run.start(fp16={"loss_scale": scale})
    losses, norms = [], []
    for step in range(3):
        backwards(engine, run, step)
        assert engine.step().applied
        losses.append(engine.last_step.loss)
        norms.append(engine.get_global_grad_norm())
    values = {n: mizzen.zero.safe_get_full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}
    return losses, norms, values


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("stage", "size"), [(0, 1), (0, 2), (1, 2), (2, 2)])
def test_a_scale_changes_neither_losses_nor_norms_nor_updates(world, stage, size, autocast):
    """Clipped, too. In fp16 a larger scale saves small gradients, so the two are close and not equal."""
    run = Run(stage, size, 2, autocast=autocast)
    plain, scaled = (ranks[0] for ranks in world(size).each(steps_of, [(run, 64.0), (run, 4096.0)]))
    assert scaled[0] == pytest.approx(plain[0], rel=1e-3)
    assert scaled[1] == pytest.approx(plain[1], rel=2e-3)
    for name, value in plain[2].items():
        assert (value - scaled[2][name]).abs().mean() < 1e-4, name


def gradients(run: Run, way: str) -> list:
    engine = run.start()
    for tokens in micro_batches(run.case, 0, engine.global_rank):
        if way == "engine":
            engine.backward(engine(tokens))
        else:
            engine.scale(engine(tokens)).backward()
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    found = [mizzen.zero.safe_get_full_grad(p) for p in engine.module.parameters()]
    report = engine.step()
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in found))
    assert report.grad_norm == pytest.approx(norm, rel=1e-4)
    return [*found, torch.tensor(report.grad_norm)]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_scale_is_for_a_backward_of_the_users_own(world, stage):
    run = Run(stage, 2, 2)
    ours, theirs = (ranks[0] for ranks in world(2).each(gradients, [(run, "engine"), (run, "scale")]))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-4)


def written_gradients() -> tuple[float, bool]:
    """A gradient that is read and written by name is that of the loss, not of the scaled one."""
    engine = Run(1, 2).start(gradient_clipping=0)
    backwards(engine, Run(1, 2), 0)
    parameters = list(engine.module.parameters())
    for parameter in parameters:
        mizzen.zero.safe_set_full_grad(parameter, torch.ones_like(parameter, dtype=torch.float32))
    read = all(bool((mizzen.zero.safe_get_full_grad(p) == 1).all()) for p in parameters)
    return engine.step().grad_norm / math.sqrt(sum(p.numel() for p in parameters)), read


def test_gradients_by_name_are_those_of_the_loss(world):
    assert world(2).run(written_gradients) == [(pytest.approx(1.0), True)] * 2


def bare_backward() -> list[str]:
    engine = Run(0, 1, 2).start()
    messages = []
    for step in range(2):
        for tokens in micro_batches(Run(0, 1, 2).case, step, 0):
            engine(tokens).backward()
            if not engine.is_gradient_accumulation_boundary():
                engine.step()
        with pytest.raises(UsageError) as caught:
            engine.step()
        messages.append(str(caught.value))
        engine.zero_grad()
    return messages


def test_a_bare_backward_is_an_error_that_names_scale(world):
    text = (
        "a bare loss.backward() while losses are scaled by 256: its gradients are not. Call "
        "engine.scale(loss).backward(), or engine.backward(loss)"
    )
    assert world(1).run(bare_backward) == [[text, text]]


def search(run: Run, power: int) -> tuple[int, bool, float]:
    """How many steps the search for a scale takes, when it starts far too high."""
    engine = run.start(fp16={"initial_scale_power": power, "hysteresis": 1}, max_consecutive_skips=2)
    for step in range(60):
        backwards(engine, run, step)
        if engine.step().applied:
            break
    return engine.skipped_steps, engine.was_step_applied(), engine.loss_scale()


def test_a_search_for_a_scale_may_take_more_skips_than_are_allowed_in_a_row(world):
    found = [row for ranks in world(2).each(search, [(Run(stage, 2), 40) for stage in (0, 1, 2)]) for row in ranks]
    assert len(set(found)) == 1
    skipped, applied, scale = found[0]
    assert skipped > 8
    assert applied
    assert scale == 2.0 ** (40 - skipped)


def at_the_minimum(run: Run) -> tuple[str, list[bool], int, float]:
    engine = run.start(fp16={"min_loss_scale": 128}, jsonl_monitor={"enabled": False})
    told = []
    engine.observers = (type("Ear", (), {"on_step": staticmethod(lambda r: told.append(r.applied))})(),)
    engine.module.norm.weight.register_hook(lambda g: g * (math.inf if engine.global_rank == 0 else 1))
    with pytest.raises(StepError) as caught:
        for step in range(9):
            backwards(engine, run, step)
            engine.step()
    return str(caught.value), told, engine.skipped_steps, engine.loss_scale()


def test_an_overflow_at_the_minimum_ends_the_run_everywhere(world):
    for message, told, skipped, scale in world(2).run(at_the_minimum, Run(2, 2)):
        assert message.startswith("the loss scale is at its minimum, 128, and gradients still overflow: gradient not ")
        assert "rank 0: norm.weight" in message
        assert told == [False] * 3  # one for the hysteresis, one that halves, one at the minimum
        assert (skipped, scale) == (3, 128)


def broken_loss() -> tuple[int, str]:
    """A loss that is not finite: no scale cures that."""
    run = Run(0, 1)
    engine = run.start(max_consecutive_skips=3)
    with pytest.raises(StepError) as caught:
        for step in range(30):
            engine.backward(engine(micro_batches(run.case, step, 0)[0]) * math.nan)
            engine.step()
    return engine.skipped_steps, str(caught.value)


def test_a_loss_that_is_not_finite_counts_as_ever(world):
    ((skipped, message),) = world(1).run(broken_loss)
    assert skipped == 3
    assert message.startswith("3 steps in a row were skipped")


def fixed_scale() -> tuple[int, float]:
    run = Run(0, 1)
    engine = run.start(fp16={"loss_scale": 128}, max_consecutive_skips=4)
    engine.module.norm.weight.register_hook(lambda g: g * math.inf)
    with pytest.raises(StepError, match="4 steps in a row were skipped"):
        for step in range(9):
            backwards(engine, run, step)
            engine.step()
    return engine.skipped_steps, engine.loss_scale()


def test_overflows_of_a_fixed_scale_count_as_ever(world):
    assert world(1).run(fixed_scale) == [(4, 128.0)]


def what_users_see() -> dict:
    run = Run(1, 2)
    engine = run.start()
    found = {"dynamic": engine.dynamic_loss_scale(), "initial": engine.initial_dynamic_scale()}
    backwards(engine, run, 0)
    with pytest.raises(UsageError, match="already scaled by 256"):
        engine.optimizer.override_loss_scale(8)
    engine.zero_grad()
    engine.optimizer.override_loss_scale(8)
    backwards(engine, run, 0)
    report = engine.step()
    found |= {"override": (engine.loss_scale(), report.loss_scale, engine.dynamic_loss_scale(), report.applied)}
    other = run.start()
    engine = run.start()
    for step in range(3):
        backwards(engine, run, step)
        engine.step()
    saved = engine.optimizer.state_dict()
    other.optimizer.load_state_dict(saved)
    found |= {"saved": saved["loss_scaler"], "loaded": other.loss_scale()}
    other.optimizer.load_state_dict({key: value for key, value in saved.items() if key != "loss_scaler"})
    return found | {"dtypes": {p.dtype for p in engine.module.parameters()}, "kept": other.loss_scale()}


def test_what_users_see_of_the_scale(world):
    for found in world(2).run(what_users_see):
        assert (found["dynamic"], found["initial"]) == (True, 256.0)
        assert found["override"] == (8.0, 8.0, False, True)
        assert found["saved"] == {"scale": 512.0, "clean": 0, "patience": 2}
        assert found["loaded"] == found["kept"] == 512.0
        assert found["dtypes"] == {torch.float16}


def without_scaling() -> list:
    engine, *_ = mizzen.initialize(model=build(Case()), config=Case(dtype="bf16").config)
    engine.backward(engine(micro_batches(Case(), 0, 0)[0]))
    report = engine.step()
    return [engine.loss_scale(), report.loss_scale, engine.dynamic_loss_scale(), report.applied]


def test_without_fp16_nothing_is_scaled(world):
    assert world(1).run(without_scaling) == [[1.0, 1.0, False, True]]


def train_batch_loss(stage: int) -> tuple[float, float]:
    run = Run(stage, 2, 2)
    model = build(run.case)
    engine = run.start(model)
    report = engine.train_batch(iter(micro_batches(run.case, 0, engine.global_rank)))
    again = Run(stage, 2, 2).start()
    backwards(again, run, 0)
    expected_report = again.step()
    assert report.applied
    return report.grad_norm - expected_report.grad_norm, report.loss - expected_report.loss


@pytest.mark.parametrize("stage", [0, 2])
def test_train_batch_scales_too(world, stage):
    for norm, loss in world(2).run(train_batch_loss, stage):
        assert abs(norm) < 1e-3
        assert abs(loss) < 1e-5


def several_groups() -> bool:
    case = Case(2, 2, 1, 0.5, "groups", "fp16", samples=8)
    model = build(case)
    engine, *_ = mizzen.initialize(model=model, model_parameters=groups(model, case), config=case.config)
    engine.backward(engine(micro_batches(case, 0, engine.global_rank)[0]))
    return engine.step().applied


def test_parameter_groups_keep_their_rates(world):
    assert world(2).run(several_groups) == [True, True]
