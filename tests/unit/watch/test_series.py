import math
import random

import pytest

from mizzen.watch.series import MOST, Series


def points(values, first=0):
    return [(float(place), float(place), float(value)) for place, value in enumerate(values, first)]


def page_of(series, cursors):
    """What a page holds that has asked at these revisions, as page.js joins it."""
    known = {}
    for told in cursors:
        for name, values in told.items():
            if name != "from":
                known[name] = known.get(name, [])[: told["from"]] + values
    return known


def test_few_points_stay_as_they_are():
    series = Series()
    series.extend(points([3, 1, 2]), 1)
    assert series.since(0) == {"from": 0, "time": [0, 1, 2], "step": [0, 1, 2], "last": [3, 1, 2]}


def test_many_points_keep_every_spike_in_bounded_memory():
    values = [random.Random(0).random() for _ in range(100_000)]
    values[54_321], values[70_001] = 99.0, -99.0
    series = Series()
    for start in range(0, len(values), 777):
        series.extend(points(values[start : start + 777], start), start)
    told = series.since(-1)
    assert MOST / 2 <= len(told["time"]) <= MOST and series.width == 128
    assert max(told["high"]) == 99.0 and min(told["low"]) == -99.0
    assert told["last"][-1] == values[-1] and told["time"][-1] == len(values) - 1
    for place in (0, 1, 300):
        bucket = values[place * 128 : place * 128 + 128]
        assert (told["low"][place], told["high"][place], told["last"][place]) == (min(bucket), max(bucket), bucket[-1])


@pytest.mark.parametrize("seed", range(5))
def test_what_changed_since_a_revision_is_enough(seed):
    generator, series, told, cursor, count = random.Random(seed), Series(16), [], -1, 0
    for revision in range(200):
        more = generator.choice([0, 1, 1, 2, 7, 40])
        if more:
            series.extend(points([generator.random() for _ in range(more)], count), revision)
        count += more
        if generator.random() < 0.4:
            told.append(series.since(cursor))
            cursor = revision
    told.append(series.since(cursor))
    whole = series.since(-1)
    assert whole.pop("from") == 0
    assert page_of(series, told) == whole
    assert series.since(200)["time"] == []


def test_what_is_not_finite_is_a_gap():
    series = Series(2)
    series.extend(points([1, math.nan, math.inf, 2]), 1)
    told = series.since(0)
    assert told["last"] == [None, 2] and told["low"] == [1, 2] and told["high"] == [1, 2]


def test_the_step_at_a_moment():
    series = Series()
    assert series.step_at(5) == 0
    series.extend([(10.0, 1.0, 0.0), (20.0, 2.0, 0.0)], 1)
    assert [series.step_at(time) for time in (5, 15, 25)] == [0, 1, 2]
