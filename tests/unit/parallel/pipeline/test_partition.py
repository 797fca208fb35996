"""Layers in parts: the heaviest part is as light as it can be, held against every way there is."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from mizzen.errors import PlanError
from mizzen.parallel.pipeline.partition import balanced, heaviest, partition, uniform

WEIGHTS = some.lists(some.one_of(some.integers(0, 50), some.floats(0, 10)), min_size=1, max_size=9)


def every_way(layers, parts):
    """All bounds of parts with at least one layer each."""
    for inner in combinations(range(1, layers), parts - 1):
        yield (0, *inner, layers)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(weights=WEIGHTS, parts=some.integers(1, 9))
def test_no_other_way_has_a_lighter_heaviest_part(weights, parts):
    parts = min(parts, len(weights))
    bounds = balanced(weights, parts)
    assert len(bounds) == parts + 1 and bounds[0] == 0 and bounds[-1] == len(weights)
    assert all(start < end for start, end in pairwise(bounds))
    least = min(heaviest(weights, way) for way in every_way(len(weights), parts))
    assert heaviest(weights, bounds) == pytest.approx(least, rel=1e-12)


def test_parts_are_even_where_the_heaviest_leaves_a_choice():
    assert balanced([1] * 6, 4) == (0, 2, 4, 5, 6)
    assert balanced([9, 1, 1, 1, 1], 3) == (0, 1, 3, 5)
    assert balanced([0, 0, 0, 0], 2) == (0, 2, 4)


def test_layers_without_weight_stay_with_the_one_before():
    assert balanced([5, 0, 5, 0, 5, 0], 3) == (0, 2, 4, 6)


def test_a_deep_model_is_quick():
    weights = [((7 * number) % 13) + 1 for number in range(1000)]
    bounds = balanced(weights, 64)
    assert heaviest(weights, bounds) <= sum(weights) / 64 + max(weights)


def test_uniform():
    assert partition([5.0] * 7, "uniform", 3) == (0, 3, 5, 7)
    assert uniform(8, 4) == (0, 2, 4, 6, 8)


def test_by_type():
    names = ["Embedding", "Block", "Block", "Dropout", "Block", "Block", "Norm", "Head"]
    assert partition(names, "type:block", 2) == (0, 4, 8)
    assert partition(names, "TYPE:^bl|head", 2) == (0, 5, 8)
    assert partition(names, "type:embedding|head", 2) == (0, 7, 8)


@pytest.mark.parametrize("method", ["parameters", "profile"])
def test_by_weight(method):
    assert partition([100, 1, 1, 1, 100], method, 3) == (0, 1, 4, 5)


@pytest.mark.parametrize(
    ("layers", "method", "parts", "words"),
    [
        ([1, 1], "uniform", 3, "2 layers cannot be dealt out to 3 parts.*use at most 2"),
        ([1, 1], "best", 2, "'best' is unknown; there are uniform, parameters"),
        (["Block", "Head"], "type:layer", 2, "matches no layer; their classes are Block, Head"),
        (["Block", "Head"], "type:(", 2, "no regular expression"),
        ([1.0, float("nan")], "profile", 2, "takes seconds of layers.*layer 1 has nan"),
        (["Block", "Head"], "parameters", 2, "takes numbers of parameters of layers.*layer 0 has 'Block'"),
    ],
)
def test_wrong_uses(layers, method, parts, words):
    with pytest.raises(PlanError, match=words):
        partition(layers, method, parts)
