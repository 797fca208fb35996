"""Models whose keys and values come from a few features (DeepSeek-V2 and -V3, MiniCPM3) train cut as in one process.

Heads of queries, of keys with values, and of values have sizes of their own, and a part of the keys is for all heads.
"""

import pytest

from breadth import FULL, chosen
from parity.test_sequence_parts import COMPILE, RECOMPUTE, compare, train

WHOLE = {"tensor_parallel": {"autotp_size": 2}}
WHOLE_ON_FOUR = {"tensor_parallel": {"autotp_size": 4}}

ON_TWO = [
    ("deepseek2", 2, 0, WHOLE),
    ("deepseek2, whole queries", 2, 3, WHOLE | RECOMPUTE),
    ("deepseek2, experts", 2, 1, WHOLE),
    ("deepseek3", 2, 2, WHOLE),
    ("deepseek3, three heads", 2, 1, WHOLE),
    ("deepseek3, experts", 2, 0, WHOLE),
    ("minicpm3", 2, 1, WHOLE),
]
ON_TWO = chosen(ON_TWO, [ON_TWO[4]])
IN_PARTS = [("deepseek2", 2, 1, {}), ("deepseek2, whole queries", 2, 0, {}, 7), ("minicpm3", 2, 3, RECOMPUTE)]
IN_PARTS = chosen(IN_PARTS, IN_PARTS[1:])
ON_FOUR = [
    ("deepseek2", 4, 1, WHOLE_ON_FOUR),
    ("deepseek2", 2, 3, WHOLE),
    ("deepseek2, experts", 4, 2, WHOLE_ON_FOUR),
    ("deepseek3", 4, 3, WHOLE_ON_FOUR | RECOMPUTE),
    ("minicpm3", 4, 0, WHOLE_ON_FOUR),
    ("minicpm3", 2, 2, WHOLE | {"gradient_accumulation_steps": 2}),
    ("deepseek3", 4, 1, {}),
    ("deepseek3", 2, 1, WHOLE | COMPILE),
]
ON_FOUR = ON_FOUR if FULL else ON_FOUR[2:7:2]
"""Without FULL=1 experts, a model that two ranks have only once, and cut sequences."""


@pytest.mark.in_parts
def test_heads_of_different_sizes_are_cut_and_train_as_in_one_process(world):
    for case, found in zip(ON_TWO, world(2).each(train, ON_TWO), strict=True):
        compare(found, case[0], *case[4:])


@pytest.mark.in_parts
def test_sequences_are_cut_between_them_too(world):
    for case, found in zip(IN_PARTS, world(2).each(train, IN_PARTS), strict=True):
        compare(found, case[0], *case[4:])


@pytest.mark.wide
def test_four_ranks_share_them(world):
    for case, found in zip(ON_FOUR, world(4).each(train, ON_FOUR, timeout=300), strict=True):
        compare(found, case[0], *case[4:])
