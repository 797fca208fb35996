"""The batch triad: every way to give it, every way to get it wrong."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.config import load
from mizzen.config.resolve import ACCUMULATION, MICRO, TRAIN, Batch
from mizzen.errors import ConfigError, LayoutError

sizes = st.integers(min_value=1, max_value=10_000)


def solve(dp, **triad):
    names = {"train": TRAIN, "micro": MICRO, "accumulation": ACCUMULATION}
    return Batch.solve({names[key]: value for key, value in triad.items()}, dp=dp)


@pytest.mark.parametrize(
    ("triad", "dp", "expected"),
    [
        ({"train": 64, "micro": 4, "accumulation": 2}, 8, (64, 4, 2, 8)),
        ({"train": 64, "micro": 4}, 8, (64, 4, 2, 8)),
        ({"train": 64, "accumulation": 2}, 8, (64, 4, 2, 8)),
        ({"micro": 4, "accumulation": 2}, 8, (64, 4, 2, 8)),
        ({"train": 64}, 8, (64, 8, 1, 8)),
        ({"micro": 4}, 8, (32, 4, 1, 8)),
        ({"micro": 1}, 1, (1, 1, 1, 1)),
        ({"train": 64, "micro": None, "accumulation": None}, 64, (64, 1, 1, 64)),
    ],
)
def test_what_is_absent_is_derived(triad, dp, expected):
    assert solve(dp, **triad) == Batch(*expected)


@pytest.mark.parametrize(
    ("triad", "dp", "message"),
    [
        (
            {"train": 10, "micro": 4, "accumulation": 2},
            1,
            "train_batch_size: 10 is not train_micro_batch_size_per_gpu * gradient_accumulation_steps * dp "
            "= 4 * 2 * 1 = 8: leave one of the three out and it is derived",
        ),
        (
            {"train": 10, "micro": 4},
            1,
            "train_batch_size: 10 is not a multiple of train_micro_batch_size_per_gpu * dp = 4 * 1 = 4: "
            "the nearest that fit are 8 and 12",
        ),
        (
            {"train": 10, "accumulation": 3},
            2,
            "train_batch_size: 10 is not a multiple of gradient_accumulation_steps * dp = 3 * 2 = 6: "
            "the nearest that fit are 6 and 12",
        ),
        ({"train": 10}, 4, "train_batch_size: 10 is not a multiple of dp = 4: the nearest that fit are 8 and 12"),
        ({"train": 3}, 4, "train_batch_size: 3 is not a multiple of dp = 4: the least that fits is 4"),
        (
            {"accumulation": 2},
            1,
            "train_batch_size: gradient_accumulation_steps = 2 alone gives no batch size: "
            "give also train_batch_size or train_micro_batch_size_per_gpu",
        ),
        ({}, 1, "give train_batch_size or train_micro_batch_size_per_gpu"),
        ({"train": 0}, 1, "train_batch_size: 0 is not a whole number of at least 1"),
        ({"micro": 2.5}, 1, "train_micro_batch_size_per_gpu: 2.5 is not a whole number"),
        ({"accumulation": True, "micro": 1}, 1, "gradient_accumulation_steps: True is not a whole number"),
        ({"train": "8"}, 1, "train_batch_size: '8' is not a whole number"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(triad, dp, message):
    with pytest.raises(ConfigError) as caught:
        solve(dp, **triad)
    assert message in str(caught.value)
    assert caught.value.path in {TRAIN, MICRO, ACCUMULATION}


@pytest.mark.parametrize("dp", [0, -1, 1.0, True, None])
def test_a_world_that_is_no_count_is_refused(dp):
    with pytest.raises(LayoutError, match="data-parallel ranks"):
        solve(dp, train=8)


def test_a_batch_cannot_be_built_wrong():
    with pytest.raises(ConfigError, match="9 is not"):
        Batch(train=9, micro=2, accumulation=2, dp=2)


def test_a_configuration_is_read_under_its_own_names():
    config = load({TRAIN: 64, MICRO: 4})
    batch = Batch.solve(config, dp=8)
    assert batch.values() == {TRAIN: 64, MICRO: 4, ACCUMULATION: 2}
    assert str(batch) == "64 = micro 4 * accumulation 2 * dp 8"


def test_auto_gives_no_batch_size():
    with pytest.raises(ConfigError, match='"auto" gives none'):
        Batch.solve(load({TRAIN: "auto", MICRO: "auto", ACCUMULATION: "auto"}), dp=8)


@given(micro=sizes, accumulation=sizes, dp=sizes)
def test_any_two_of_a_triad_give_the_third(micro, accumulation, dp):
    whole = Batch(micro * accumulation * dp, micro, accumulation, dp)
    assert solve(dp, micro=micro, accumulation=accumulation) == whole
    assert solve(dp, train=whole.train, micro=micro) == whole
    assert solve(dp, train=whole.train, accumulation=accumulation) == whole
    assert solve(dp, train=whole.train, micro=micro, accumulation=accumulation) == whole


@given(train=sizes, micro=st.none() | sizes, accumulation=st.none() | sizes, dp=sizes)
def test_either_the_product_holds_or_the_values_offered_instead_do(train, micro, accumulation, dp):
    triad = {"train": train, "micro": micro, "accumulation": accumulation}
    try:
        batch = solve(dp, **triad)
    except ConfigError as error:
        offered = re.search(r"nearest that fit are (\d+) and (\d+)|least that fits is (\d+)", str(error))
        assert offered or None not in triad.values()
        fitting = [int(number) for number in offered.groups() if number] if offered else []
        for number in fitting:
            solve(dp, **{**triad, "train": number})
        if len(fitting) == 2:
            assert fitting[0] < train < fitting[1]
    else:
        assert batch.train == train == batch.micro * batch.accumulation * dp
        assert micro in (None, batch.micro)
        assert accumulation in (None, batch.accumulation)
