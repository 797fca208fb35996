"""Ratios of systems that took turns: right where the truth is known, and deaf to what slows a whole round down."""

import random
from statistics import median

import pytest
from bench.paired import Ratio, ratio, typical


def noisy(factor, rounds=12, steps=3, *, slow=(), seed=1):
    """Turns of a system that takes `factor` times as long, with the machine three times slower in some rounds."""
    draw = random.Random(seed + round(1000 * factor))
    return [
        [factor * (3.0 if number in slow else 1.0) * draw.gauss(1, 0.01) for _ in range(steps)]
        for number in range(rounds)
    ]


def test_a_ratio_is_that_of_the_typical_steps():
    assert ratio([[2.0], [4.0], [9.0]], [[1.0], [2.0], [3.0]]).value == 2.0
    assert ratio([[1.0, 2.0, 30.0]], [[1.0, 1.0, 9.0]]).value == 2.0


def test_the_interval_covers_the_truth_and_not_much_more():
    found = ratio(noisy(1.1), noisy(1.0))
    assert found.low < 1.1 < found.high
    assert 1.08 < found.low <= found.value <= found.high < 1.12


def test_slow_rounds_hit_both_and_change_nothing():
    slow = range(6)
    ours, theirs = noisy(1.1, slow=slow), noisy(1.0, slow=slow)
    found = ratio(ours, theirs)
    assert found.high - found.low < 0.04
    assert found.value == pytest.approx(1.1, abs=0.02)
    apart = median(seconds for turn in ours for seconds in turn[:1]) / theirs[-1][0]
    assert abs(apart - 1.1) > 0.3  # what comparing times of different rounds would have said


def test_one_wild_turn_does_not_carry_the_result():
    ours = noisy(1.0, rounds=9, seed=5)
    ours[4] = [50.0, 50.0, 50.0]
    assert ratio(ours, noisy(1.0, rounds=9)).value == pytest.approx(1.0, abs=0.02)


def test_more_noise_widens_the_interval():
    draw = random.Random(3)
    wide = [[draw.gauss(1, 0.2)] for _ in range(12)]
    narrow = ratio(noisy(1.0, steps=1), noisy(1.0, steps=1, seed=8))
    loose = ratio(wide, noisy(1.0, steps=1))
    assert loose.high - loose.low > 3 * (narrow.high - narrow.low)


def test_the_same_turns_give_the_same_interval():
    assert ratio(noisy(1.1), noisy(1.0)) == ratio(noisy(1.1), noisy(1.0))


def test_an_even_match_is_exactly_one():
    assert ratio([[1.5], [1.5]], [[1.5], [1.5]]) == Ratio(1.0, 1.0, 1.0)


@pytest.mark.parametrize(("of", "to"), [([[1.0]], [[1.0], [1.0]]), ([], [])])
def test_turns_that_do_not_pair_are_refused(of, to):
    with pytest.raises(ValueError, match=f"{len(of)} turns cannot be paired with {len(to)}"):
        ratio(of, to)


def test_how_it_reads():
    assert str(Ratio(0.9, 0.85, 1.0)) == "0.900 (0.850 - 1.000)"
    assert Ratio(1.15, 1.098, 1.22).as_overhead() == "+15.0 % (+9.8 - +22.0)"
    assert Ratio(0.9, 0.8, 1.0).as_overhead() == "-10.0 % (-20.0 - +0.0)"


def test_a_typical_step_is_the_median_of_all():
    assert typical([[1.0, 2.0], [3.0], [100.0, 4.0]]) == 3.0
