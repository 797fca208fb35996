"""Elastic batches: the numbers that existing files get, and errors instead of batches of 0."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.config.elasticity import HIGHLY_COMPOSITE, Elastic, ElasticityConfig, compute_elastic
from mizzen.errors import ConfigError, LayoutError, MizzenError

SMALL = {"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.1}
NODES = {"max_train_batch_size": 1000, "micro_batch_sizes": [2, 4, 6], "num_gpus_per_node": 8, "version": 0.2}


def compute(keys, world=0):
    return compute_elastic(ElasticityConfig(enabled=True, **keys), world)


def test_the_table_holds_the_highly_composite_numbers():
    last = HIGHLY_COMPOSITE[-1]
    divisors = [0] * (last + 1)
    for step in range(1, math.isqrt(last) + 1):  # in pairs, of which this is the smaller
        divisors[step * step] += 1
        larger = slice(step * (step + 1), None, step)
        divisors[larger] = [count + 2 for count in divisors[larger]]
    records, most = [], 0
    for number in range(1, last + 1):
        if divisors[number] > most:
            records.append(number)
            most = divisors[number]
    assert tuple(records) == HIGHLY_COMPOSITE


# What DeepSpeed 0.19.6 computes for the same section and number of GPUs.
SMALL_VALID = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, 20, 21, 24, 28, 30, 35, 40, 42, 56, 60, 70, 84, 105, 120, 140)
SMALL_VALID += (168, 210, 280, 420, 840)
WIDE = {"max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32, "max_gpus": 1500}
WIDE_VALID = (32, 34, 36, 48, 51, 64, 68, 72, 96, 102, 136, 144, 153, 192, 204, 272, 288, 306, 408, 576, 612, 816, 1224)
NODES_VALID = (8, 16, 24, 32, 40, 48, 80, 96, 120, 160, 240, 480)


@pytest.mark.parametrize(
    ("keys", "world", "expected"),
    [
        (SMALL, 0, Elastic(1680, SMALL_VALID)),
        (SMALL, 60, Elastic(1680, SMALL_VALID, 4)),
        ({**SMALL, "prefer_larger_batch": False}, 60, Elastic(1680, SMALL_VALID, 4)),
        ({**WIDE, "version": 0.1}, 0, Elastic(9792, WIDE_VALID)),
        ({**WIDE, "version": 0.1}, 64, Elastic(9792, WIDE_VALID, 17)),
        (
            {"max_train_batch_size": 4, "micro_batch_sizes": [1, 2, 3, 4], "max_gpus": 4, "version": 0.1}
            | {"prefer_larger_batch": False},
            0,
            Elastic(4, (1, 2, 4)),
        ),
        (
            {"max_train_batch_size": 1000, "micro_batch_sizes": [64, 900], "max_gpus": 8, "version": 0.1},
            3,
            Elastic(768, (1, 2, 3, 4, 6), 64),
        ),
        (NODES, 16, Elastic(960, NODES_VALID, 6)),
        (NODES, 88, Elastic(880, (88,), 2)),
        (NODES, 4, Elastic(1000, (4,), 2)),
        ({**NODES, "prefer_larger_batch": False}, 88, Elastic(528, (88,), 6)),
        (
            {"max_train_batch_size": 5000, "micro_batch_sizes": [3, 5], "num_gpus_per_node": 4, "version": 0.2}
            | {"min_gpus": 8, "max_gpus": 64},
            24,
            Elastic(4800, (8, 12, 16, 20, 24, 32, 40, 48, 60, 64), 5),
        ),
    ],
)
def test_the_numbers_are_the_known_ones(keys, world, expected):
    assert compute(keys, world) == expected


def test_a_batch_beyond_the_table_stops_at_its_last_number():
    found = compute({"max_train_batch_size": 720720 * 20, "micro_batch_sizes": [8], "max_gpus": 64, "version": 0.1}, 24)
    assert (found.batch, found.micro) == (720720 * 8, 8)


@pytest.mark.parametrize(
    ("parallel", "world", "expected"),
    [
        (2, 16, (960, (4, 8, 12, 16, 20, 24, 32, 40, 48, 60, 80, 96, 120, 160, 240, 480), 6)),
        (4, 64, (960, (2, 4, 6, 8, 10, 12, 16, 20, 24, 30, 32, 40, 48, 60, 80, 96, 120, 160, 240, 480), 6)),
        (2, 22, (990, (11,), 6)),
    ],
)
def test_model_parallelism_counts_gpus_where_the_known_list_counts_ranks(parallel, world, expected):
    batch, ranks, micro = expected
    found = compute({**NODES, "model_parallel_size": parallel}, world)
    assert found == Elastic(batch, tuple(count * parallel for count in ranks), micro)


@pytest.mark.parametrize(
    ("keys", "world", "kind", "message"),
    [
        (SMALL, 61, LayoutError, "61 GPUs cannot share the elastic batch of 1680"),
        (SMALL, 61, LayoutError, "the nearest that can: 56 and 60"),
        (SMALL, 20_000, LayoutError, "outside elasticity.min_gpus to max_gpus, 1 to 10000"),
        (NODES, 0, ConfigError, "elasticity.version: 0.2 depends on the number of GPUs"),
        (NODES, 2000, ConfigError, "elasticity.max_train_batch_size: 1000 is below the smallest batch of 2000"),
        ({**NODES, "max_gpus": 16}, 32, LayoutError, "32 GPUs are outside"),
        ({**NODES, "model_parallel_size": 3}, 8, ConfigError, "elasticity.num_gpus_per_node: 8 is not a multiple of"),
        ({**NODES, "model_parallel_size": 2}, 9, LayoutError, "9 GPUs are not a multiple of"),
        (
            {**NODES, "micro_batch_sizes": [200]},
            8,
            ConfigError,
            "200 is above the largest batch per data-parallel rank",
        ),
        (
            {**SMALL, "micro_batch_sizes": [4000]},
            0,
            ConfigError,
            "micro_batch_sizes: 4000 is above the largest batch, 2000",
        ),
        ({**SMALL, "model_parallel_size": 2}, 0, ConfigError, "needs elasticity.version 0.2"),
        ({**SMALL, "min_gpus": 900, "max_gpus": 999}, 0, ConfigError, "no number of GPUs from 900 to 999"),
        ({**SMALL, "max_gpus": 10**18}, 0, ConfigError, "elasticity.max_gpus: 1000000000000000000 is above"),
        ({"version": 0.1, "micro_batch_sizes": [2]}, 0, ConfigError, "elasticity.max_train_batch_size"),
        ({"version": 0.1, "max_train_batch_size": 2}, 0, ConfigError, "elasticity.micro_batch_sizes"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(keys, world, kind, message):
    with pytest.raises(kind) as caught:
        compute(keys, world)
    assert message in str(caught.value)


def test_a_micro_batch_that_cannot_grow_to_the_world_is_passed_over():
    """29 * 32 is above 715: its largest multiple is 0, which must not count as the smallest batch."""
    keys = {"max_train_batch_size": 715, "micro_batch_sizes": [2, 29], "prefer_larger_batch": False, "version": 0.2}
    assert compute(keys, 32) == Elastic(704, (32,), 2)


@settings(max_examples=200)
@given(
    limit=st.integers(1, 20_000),
    micros=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    prefer=st.booleans(),
    version=st.sampled_from([0.1, 0.2]),
    per_node=st.sampled_from([1, 2, 4, 8]),
    world=st.integers(1, 128),
)
def test_an_answer_always_divides(limit, micros, prefer, version, per_node, world):
    keys = {"max_train_batch_size": limit, "micro_batch_sizes": micros, "prefer_larger_batch": prefer}
    try:
        found = compute({**keys, "version": version, "num_gpus_per_node": per_node}, world)
    except MizzenError:
        return
    assert 0 < found.batch <= limit
    assert found.micro in micros
    assert world in found.valid_gpus
    assert found.batch % (found.micro * world) == 0
    for gpus in found.valid_gpus:
        assert any(found.batch % (micro * gpus) == 0 for micro in micros)
