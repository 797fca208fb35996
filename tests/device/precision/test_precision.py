"""Low precision on an accelerator: the losses of the CPU, the rules of the loss scale, and what stays after a step."""

import math

import pytest
import torch

import mizzen
from mizzen.accelerator import get_accelerator
from parity.programs import Case, build, groups, micro_batches, reference

STEPS = 5


def start(case: Case, **extra):
    model = build(case)
    return mizzen.initialize(model=model, model_parameters=groups(model, case), config=case.config | extra)[0]


def train(case: Case, **extra) -> list[float]:
    engine = start(case, **extra)
    losses = []
    for step in range(STEPS):
        for tokens in micro_batches(case, step, 0):
            engine.backward(engine(tokens.to(engine.device)))
            report = engine.step()
        assert report.applied
        losses.append(report.loss)
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("dtype", ["fp16", "autocast", "autocast16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_losses_are_those_of_the_cpu(stage, dtype, optimizer):
    case = Case(stage, 1, 2, 0.5, "tied", dtype, optimizer)
    assert train(case) == pytest.approx(reference(case)[0], rel=1e-2)


LOW = {
    "fp16": {"fp16": {"enabled": True, "loss_scale": 256, "fp16_master_weights_and_grads": True}},
    "bf16": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "bf16 states": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
}


@pytest.mark.parametrize("kind", LOW)
def test_low_masters_train(kind):
    case = Case(1, 1, 2, 0.5)
    losses = train(case, **LOW[kind])
    assert losses == pytest.approx(reference(case)[0], rel=2e-2)


def memory_at_rest(**keys) -> int:
    """Bytes that stay allocated after a step with a model of 4 million elements, above what was there before."""
    before = get_accelerator().memory().allocated
    model = torch.nn.Linear(2048, 2048, bias=False)  # a multiple of what the allocator hands out
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "progress": {"enabled": False},
    }
    engine, *_ = mizzen.initialize(model=model, config=config | keys)
    rows = torch.ones(4, 2048, device=engine.device, dtype=model.weight.dtype)
    engine.backward(engine(rows).float().pow(2).mean())
    assert engine.step().applied
    held = get_accelerator().memory().allocated - before
    engine.destroy()
    return held


@pytest.mark.parametrize(("kind", "bytes_each"), [("fp16", 10), ("bf16", 10), ("bf16 states", 6)])
def test_nothing_of_a_step_stays(kind, bytes_each):
    memory_at_rest(**LOW[kind])  # whatever a first run leaves behind for good
    assert memory_at_rest(**LOW[kind]) == pytest.approx(2048 * 2048 * bytes_each, rel=0.02)


def test_an_overflow_skips_and_halves():
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2, "loss_scale_window": 2}
    engine = start(Case(0, 1), fp16=fp16)
    armed = {"on": False}
    engine.module.norm.weight.register_hook(lambda g: g * math.inf if armed["on"] else g)
    found = []
    for step, overflows in enumerate((False, True, True, False, False)):
        armed["on"] = overflows
        before = [p.detach().clone() for p in engine.module.parameters()]
        engine.backward(engine(micro_batches(Case(), step, 0)[0].to(engine.device)))
        report = engine.step()
        same = all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
        assert same == overflows
        found.append((report.applied, engine.loss_scale()))
    assert found == [(True, 256), (False, 256), (False, 128), (True, 128), (True, 256)]


def test_every_format_that_is_refused_is_refused_by_its_key():
    if get_accelerator().supports(torch.float16):
        assert start(Case(dtype="fp16")).module.norm.weight.dtype == torch.float16
    else:
        with pytest.raises(mizzen.errors.DeviceError, match="fp16.enabled"):
            start(Case(dtype="fp16"))
