"""The ranks compare what they are about to do; the one that differs is named on every rank."""

import pytest
import torch
import torch.distributed as dist

from mizzen.comm.fingerprint import compare, explain, flatten
from mizzen.errors import CommError

FIELDS = {"configuration": "7f", "torch": "2.13.0", "model": "a1"}


def try_to_agree(odd, changes, group_ranks=None):
    """The error of a comparison in which the rank `odd` has other fields; None without one."""
    group = dist.new_group(group_ranks) if group_ranks else None
    rank = dist.get_rank()
    if group_ranks and rank not in group_ranks:
        return None
    fields = {name: text for name, text in (FIELDS | (changes if rank == odd else {})).items() if text is not None}
    try:
        compare(fields, group)
    except CommError as error:
        return str(error)
    finally:
        # Whatever was said, the group still works.
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        assert value.item() == dist.get_world_size(group)


def test_equal_ranks_agree(world):
    assert world(3).run(try_to_agree, -1, {}) == [None] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch": "2.11.0"}, "torch: rank 2 has 2.11.0, the others 2.13.0"),
        ({"configuration": "81" * 100}, f"configuration: rank 2 has {'81' * 30}... (200 characters), the others 7f"),
        ({"extra": "1"}, "extra: rank 2 has 1, the others nothing"),
        (
            {"torch": None, "model": None},
            "model: rank 2 has nothing, the others a1; torch: rank 2 has nothing, the others",
        ),
        ({f"field {n}": "x" * n for n in range(40)}, " and 34 more. Start all"),
    ],
    ids=["value", "long value", "one more", "two fewer", "forty more"],
)
def test_the_odd_rank_is_named_with_both_values(world, changes, message):
    texts = world(3).run(try_to_agree, 2, changes)
    assert texts[0] == texts[1] == texts[2]
    assert message in texts[0]
    assert texts[0].startswith("the ranks are not about to do the same: ")


def test_of_two_ranks_the_second_counts_as_odd(world):
    texts = world(2).run(try_to_agree, 0, {"model": "b2"})
    assert texts[0] == texts[1] and "model: rank 1 has a1, the others b2" in texts[0]


def test_only_the_group_is_compared(world):
    assert world(3).run(try_to_agree, 0, {"model": "b2"}, [1, 2]) == [None] * 3
    texts = world(3).run(try_to_agree, 2, {"model": "b2"}, [1, 2])
    assert texts[0] is None and "model: rank 2 has b2, the others a1" in texts[1] == texts[2]


def all_different():
    try:
        compare({"model": f"model of rank {dist.get_rank()}"})
    except CommError as error:
        return str(error)


def test_all_different(world):
    texts = world(4).run(all_different)
    assert len(set(texts)) == 1
    assert "model: rank 1 has model of rank 1, the others model of rank 0; model: rank 2 has" in texts[0]


def test_the_majority_is_right_field_by_field():
    ranks = [
        (0, {"a": "odd", "b": "x"}),
        (1, {"a": "1", "b": "x"}),
        (2, {"a": "1", "b": "y"}),
        (3, {"a": "1", "b": "y"}),
    ]
    text = explain([*ranks, (4, {"a": "1", "b": "y"})])
    assert "a: rank 0 has odd, the others 1; b: ranks 0, 1 have x, the others y." in text


def test_many_odd_ranks_are_counted():
    ranks = [(rank, {"a": "x" if rank % 2 else "y"}) for rank in range(101)]
    assert "ranks 1, 3, 5, 7, 9, 11, 13, 15 and 42 more have x, the others y" in explain(ranks)


def test_nested_values_become_named_fields():
    config = {"zero": {"stage": 2, "offload": {}}, "lrs": [0.1, "auto"], "flag": None}
    assert flatten(config) == {
        "zero.stage": "2", "zero.offload": "{}", "lrs[0]": "0.1", "lrs[1]": "auto", "flag": "None"
    }  # fmt: skip
