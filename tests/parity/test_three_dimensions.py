"""Tensor parallelism, pipelines, ZeRO and data ranks in one engine train as one process does."""

import pytest

import mizzen
from breadth import choice
from parity.decoders import MODELS, Decoder
from parity.test_tensor import config, reference, values_of, walk

TIED = {"head.weight": "embed.weight"}
CASES = [
    ("grouped", 4, 1, 2, {}),
    ("interleaved", 4, 3, 2, {}),
    ("grouped", 8, 1, 2, {}),
    ("grouped", 8, 3, 2, {}),
    ("grouped", 4, 0, 2, {"pipeline": {"schedule": "zero_bubble"}}),
    ("runs", 4, 2, 4, {}),
    ("stacked", 8, 2, 2, {}),
    ("one key", 4, 1, 1, {}),
    ("uneven", 4, 1, 4, {}),
    ("adapted", 8, 1, 2, {}),
]
"""Model, ranks, ZeRO stage, accumulation, more keys: 2 tensor-parallel ranks and 2 stages, the rest are data ranks."""


def train(kind: str, stage: int, accumulation: int, more: dict) -> tuple:
    settings = config(2, stage, accumulation=accumulation, pipeline_parallel_size=2, **more)
    engine, *_ = mizzen.initialize(model=Decoder(**MODELS[kind]), config=settings)
    return *walk(engine), values_of(engine)


@pytest.mark.parametrize(("kind", "size", "stage", "accumulation", "more"), choice(CASES, CASES[1:2]))
def test_matrices_and_blocks_over_ranks_train_as_one_process(world, kind, size, stage, accumulation, more):
    expected, wanted_norms, parameters = reference(kind, "SGD", 0.0)
    before = dict(Decoder(**MODELS[kind]).named_parameters())
    seen = set()
    for losses, norms, values in world(size).run(train, kind, stage, accumulation, more):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert norms == pytest.approx(wanted_norms, rel=1e-5)
        for given, value in values.items():
            name = given if given in before else TIED[given]  # a stage may know a weight by its other name alone
            wanted = parameters[name] - before[name]
            assert (value - before[name] - wanted).norm() <= 2e-3 * wanted.norm(), name
            seen.add(name)
    assert seen == {name for name, parameter in before.items() if parameter.requires_grad}
