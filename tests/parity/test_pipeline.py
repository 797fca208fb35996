"""A model in stages trains as one process does: every schedule, every ZeRO stage, uneven layers, odd micro-batches."""

import os
from functools import cache
from operator import itemgetter

import pytest
import torch

from breadth import choice, together
from mizzen.parallel.pipeline.tables import TABLES
from parity import pipelines

CASES = [
    (2, "1f1b", 1, 3),
    (2, "gpipe", 0, 4),
    (2, "interleaved", 0, 3),
    (2, "looped_bfs", 1, 4),
    (2, "zero_bubble", 0, 4),
    (2, "zbv", 0, 3),
    (2, "dualpipev", 1, 4),
    (4, "1f1b", 2, 3),
    (4, "zero_bubble", 2, 4),
    (4, "interleaved", 3, 3),
    (4, "zbv", 1, 1),
    (8, "1f1b", 1, 3),
    (8, "interleaved", 3, 1),
]
"""Ranks, schedule, ZeRO stage, micro-batches."""
if os.environ.get("FULL"):
    CASES += [(4, name, stage, micros) for name in TABLES for stage in range(4) for micros in (1, 3, 4)]
    CASES = [*dict.fromkeys(CASES)]
SHORT = [(2, "1f1b", 1, 3), (2, "zbv", 0, 3), (4, "zero_bubble", 2, 4), (4, "interleaved", 3, 3)]


@cache
def reference(frozen: str = "") -> tuple:
    """One process with plain torch, one batch at a time."""
    model = pipelines.freeze(pipelines.build(1), frozen)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses, norms = [], []
    for step in range(pipelines.STEPS):
        generator = torch.Generator().manual_seed(step)
        shape = (pipelines.SAMPLES, pipelines.LENGTH + 1)
        tokens = torch.randint(0, pipelines.VOCABULARY, shape, generator=generator)
        loss = pipelines.loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        optimizer.step()
        losses.append(loss.item())
    updates = {name: parameter.detach() - start[name] for name, parameter in model.named_parameters()}
    return losses, norms, start, updates


def check(runs: list, frozen: str = "") -> None:
    losses, norms, start, updates = reference(frozen)
    seen = set()
    for found, found_norms, found_values in runs:
        assert found == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-5)
        for name, value in found_values.items():
            difference = (value - start[name] - updates[name]).norm()
            assert difference <= 2e-3 * updates[name].norm(), name
            seen.add(name)
    assert seen == set(updates)


@pytest.mark.parametrize("cases", together(CASES, itemgetter(0), SHORT))
def test_a_pipeline_trains_as_one_process_does(world, cases):
    given = [(2, stage, schedule, micros) for _, schedule, stage, micros in cases]
    for found in world(cases[0][0]).each(pipelines.train, given):
        check(found)


@pytest.mark.parametrize(("schedule", "micros"), choice([("1f1b", 3), ("gpipe", 1), ("zbv", 2)], [("1f1b", 3)]))
def test_four_stages_of_uneven_layers_train_as_one_process_does(world, schedule, micros):
    """Nine layers on four stages, and fewer micro-batches than stages."""
    check(world(4).run(pipelines.train, 4, 0, schedule, micros))


FROZEN = [
    ("first stage", 4, 1, "1f1b"),
    ("last stage", 2, 0, "zero_bubble"),
    ("some", 4, 3, "1f1b"),
    ("some", 2, 0, "zbv"),
]


@pytest.mark.parametrize(("which", "ranks", "stage", "schedule"), choice(FROZEN, FROZEN[:2]))
def test_frozen_layers_stay_as_they_are_and_the_rest_trains_as_in_one_process(world, which, ranks, stage, schedule):
    check(world(ranks).run(pipelines.train_frozen, which, stage, schedule), which)


@pytest.mark.parametrize("stage", choice([1, 3], [3]))
def test_one_stage_trains_as_one_process_does(world, stage):
    check(world(2).run(pipelines.train, 1, stage, "1f1b", 2))


@pytest.mark.parametrize("live", choice([0, 10**9], [0]))
@pytest.mark.parametrize("schedule", choice(["1f1b", "interleaved"], ["1f1b"]))
def test_stage_3_trains_alike_whether_it_stays_gathered_or_not(world, schedule, live):
    more = {"stage3_max_live_parameters": live}
    check(world(4).run(pipelines.train, 2, 3, schedule, 3, pipelines.STEPS, more))
