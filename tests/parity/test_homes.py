"""Homes are all that a strategy has to draw: toys of all kinds of parallelism train as one process does."""

import itertools
import os

import pytest
import torch

import mizzen
import mizzen.api
import mizzen.plan.build
from mizzen.order import ORDER
from parity.toys import LENGTH, VOCABULARY, Columns, Flock, Toy

STEPS, SAMPLES = 3, 8


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)


def config(stage, optimizer, clip, accumulation, tp, ep) -> dict:
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": optimizer, "params": {"lr": 0.01 if optimizer == "AdamW" else 0.1}},
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 300},
        "tensor_parallel": {"autotp_size": tp},
        "expert_parallel": {"enabled": ep > 1, "autoep_size": ep},
        "progress": {"enabled": False},
        "seed": 1,
    }


def train(*case) -> tuple[list, list, dict]:
    """What a user writes, on one rank."""
    mizzen.api.ORDER = (Columns(), Flock(), *ORDER)
    mizzen.plan.build.refusals = lambda config: ()
    engine, *_ = mizzen.initialize(model=Toy(), config=config(*case))
    ranks, rank = engine.dp_world_size, engine.get_data_parallel_rank()
    micro = SAMPLES // ranks // engine.gradient_accumulation_steps()
    losses, norms = [], []
    for step in range(STEPS):
        for tokens in batch(step).view(ranks, -1, micro, LENGTH)[rank]:
            engine.backward(engine(tokens))
            report = engine.step()
        assert report.applied
        losses.append(report.loss)
        norms.append(report.grad_norm)
    values = {name: mizzen.zero.safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    return losses, norms, values


def reference(optimizer: str, clip: float) -> tuple[list, list, dict]:
    """One process, plain torch."""
    model = Toy()
    kind = getattr(torch.optim, optimizer)
    rule = kind(model.parameters(), lr=0.01 if optimizer == "AdamW" else 0.1, **({"weight_decay": 0.0}))
    losses, norms = [], []
    for step in range(STEPS):
        rule.zero_grad()
        loss = model(batch(step))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)))
        rule.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def check(world, size, stage, optimizer, clip, accumulation, tp, ep) -> None:
    expected, norms, parameters = reference(optimizer, clip)
    start = dict(Toy().named_parameters())
    seen = set()
    for got in world(size).run(train, stage, optimizer, clip, accumulation, tp, ep):
        assert got[0] == pytest.approx(expected, rel=1e-5)
        assert got[1] == pytest.approx(norms, rel=1e-5)
        for name, value in got[2].items():
            seen.add(name)
            if optimizer == "SGD":
                moved, wanted = value - start[name], parameters[name] - start[name]
                assert (moved - wanted).norm() <= 2e-3 * wanted.norm(), name
    assert seen == set(parameters)


PLANS = [(4, 2, 1), (4, 4, 1), (4, 1, 2), (4, 1, 4), (4, 2, 2), (8, 2, 2), (8, 4, 2)]
CASES = list(itertools.product(PLANS, (0, 1, 2, 3), ("SGD", "AdamW"), (0.0, 0.5), (1, 2)))
PAIRS = [case for number, case in enumerate(CASES) if number % 11 == 0 and (case[2] != "SGD" or case[3] == 0)]
SHOWN = [case for case in CASES if case[2] != "SGD" or case[3] == 0] if os.environ.get("FULL") else PAIRS


@pytest.mark.parametrize(("plan", "stage", "optimizer", "clip", "accumulation"), SHOWN)
def test_any_homes_train_as_one_process_does(world, plan, stage, optimizer, clip, accumulation):
    size, tp, ep = plan
    if SAMPLES // (size // tp) < accumulation:
        pytest.skip("fewer samples than ranks and micro-batches")
    check(world, size, stage, optimizer, clip, accumulation, tp, ep)
