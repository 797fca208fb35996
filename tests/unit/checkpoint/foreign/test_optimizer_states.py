"""Which parameter a number means: certain, or not said."""

import pytest

from mizzen.checkpoint.foreign.optimizer_states import align

MODEL = {"a": (2, 2), "b": (3,), "c": (2, 2), "d": (3,)}


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ([[(2, 2), (3,), (2, 2), (3,)]], [["a", "b", "c", "d"]]),
        ([[(2, 2), (2, 2)], [(3,), (3,)]], [["a", "c"], ["b", "d"]]),
        ([[(3,), (3,)], [(2, 2), (2, 2)]], [["b", "d"], ["a", "c"]]),
        ([[(2, 2), (2, 2)]], [["a", "c"]]),
        ([[(2, 2)], [(2, 2)]], None),  # either may come first
        ([[(2, 2)]], None),  # a or c
        ([[(2, 2), (3,)]], None),
        ([[(3,), (2, 2), (2, 2), (3,)]], None),  # not in the order of the model
        ([[(5,)]], None),
        ([[(2, 2), (3,), (2, 2), (3,), (3,)]], None),
        ([[]], [[]]),
    ],
)
def test_alignment(groups, names):
    assert align(MODEL, groups) == names


def test_many_parameters_are_no_trouble():
    model = {f"{layer}.{part}": shape for layer in range(500) for part, shape in (("w", (4, 4)), ("b", (4,)))}
    weights, biases = ([name for name in model if name.endswith(end)] for end in (".w", ".b"))
    assert align(model, [[(4, 4)] * 500, [(4,)] * 500]) == [weights, biases]


def test_too_many_ways_are_given_up():
    assert align({str(number): (1,) for number in range(400)}, [[(1,)] * 200, [(1,)] * 200]) is None
