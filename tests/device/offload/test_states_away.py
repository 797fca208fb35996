"""States that leave an accelerator for a while: its memory is what it was before the engine, and the bits come back."""

import gc

import pytest
import torch
from torch import nn

import mizzen
from mizzen.accelerator import get_accelerator

LEFT = 1 << 20
WIDTH = 1024


def start(stage, dtype):
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    model[0].requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "bf16": {"enabled": dtype == "bf16"},
        "progress": {"enabled": False},
    }
    return mizzen.initialize(model=model, config=config)[0]


def allocated():
    gc.collect()
    get_accelerator().synchronize()
    return get_accelerator().memory().allocated


def step(engine, dtype, number):
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(4, WIDTH, generator=generator).to(engine.device, getattr(torch, dtype))
    engine.backward(engine(inputs).float().square().mean())
    return float(engine.step().loss)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_the_memory_is_free_meanwhile_and_the_bits_come_back(stage, dtype, non_blocking):
    kind = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    alone = start(stage, kind)
    expected = [step(alone, dtype, number) for number in range(6)]
    weights = [parameter.detach().cpu() for parameter in alone.module.parameters()]
    alone.destroy()
    del alone
    before = allocated()
    engine = start(stage, kind)
    losses = []
    for number in range(6):
        losses.append(step(engine, dtype, number))
        here = allocated()
        engine.offload_states(non_blocking=non_blocking)
        assert allocated() - before < LEFT
        engine.reload_states(non_blocking=non_blocking)
        assert allocated() == here
    assert losses == expected
    assert all(torch.equal(a.cpu(), b) for a, b in zip(engine.module.parameters(), weights, strict=True))


def test_two_engines_share_the_device_by_turns():
    before = allocated()
    engines = [start(0, "bf16"), start(0, "bf16")]
    for engine in engines:
        engine.offload_states()
    losses = []
    for number in range(50):
        for engine in engines:
            engine.reload_states(non_blocking=True)
            losses.append(step(engine, "bfloat16", number))
            engine.offload_states(non_blocking=True)
        assert allocated() - before < 2 * LEFT
    assert losses[::2] == losses[1::2]
