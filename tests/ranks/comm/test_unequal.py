"""What the ranks bring to a collective does not fit: each is told so on a CPU, before gloo aborts or is silent."""

import re
import time

import pytest
import torch

import mizzen.comm as dist
from mizzen.comm import ReduceOp
from mizzen.errors import CommError, UsageError

PARTED = "the ranks have parted ways; nothing was exchanged. "
SIZES = r"rank 0 at {} of 4 torch.float32; rank 1 at {} of 8 torch.float32"


def ones(size, dtype=torch.float32):
    return torch.ones(size, dtype=dtype)


CASES = {
    "all_reduce": (lambda rank, size: dist.all_reduce(ones(size)), SIZES),
    "reduce to rank 1": (lambda rank, size: dist.reduce(ones(size), 1), SIZES),
    "broadcast from rank 0": (lambda rank, size: dist.broadcast(ones(size), 0), SIZES),
    "broadcast from rank 1": (lambda rank, size: dist.broadcast(ones(size), 1), SIZES),
    "all_gather": (lambda rank, size: dist.all_gather([ones(size), ones(size)], ones(size)), SIZES),
    "all_gather_into_tensor": (lambda rank, size: dist.all_gather_into_tensor(ones(2 * size), ones(size)), SIZES),
    "reduce_scatter": (lambda rank, size: dist.reduce_scatter(ones(size), [ones(size), ones(size)]), SIZES),
    "reduce_scatter_tensor": (lambda rank, size: dist.reduce_scatter_tensor(ones(size), ones(2 * size)), SIZES),
    "gather to rank 0": (
        lambda rank, size: dist.gather(ones(size), [ones(4), ones(4)] if rank == 0 else None, 0),
        SIZES,
    ),
    "scatter from rank 0": (
        lambda rank, size: dist.scatter(ones(size), [ones(4), ones(4)] if rank == 0 else None, 0),
        SIZES,
    ),
    "the dtype": (
        lambda rank, size: dist.all_reduce(ones(4, torch.int32 if rank else torch.float32)),
        "rank 0 at all_reduce of 4 torch.float32; rank 1 at all_reduce of 4 torch.int32",
    ),
    "the reduction": (
        lambda rank, size: dist.all_reduce(ones(4), ReduceOp.MAX if rank else ReduceOp.SUM),
        "rank 0 at all_reduce of 4 torch.float32; rank 1 at all_reduce by MAX of 4 torch.float32",
    ),
    "the reduction of reduce": (
        lambda rank, size: dist.reduce(ones(4), 0, ReduceOp.MIN if rank else ReduceOp.MAX),
        "rank 0 at reduce to rank 0 by MAX of 4 torch.float32; rank 1 at reduce to rank 0 by MIN of 4",
    ),
    "the root": (
        lambda rank, size: dist.broadcast(ones(4), rank),
        "rank 0 at broadcast from rank 0 of 4 torch.float32; rank 1 at broadcast from rank 1 of 4",
    ),
    "the operation": (
        lambda rank, size: dist.all_reduce(ones(4)) if rank else dist.broadcast(ones(4), 0),
        "rank 0 at broadcast from rank 0 of 4 torch.float32; rank 1 at all_reduce of 4 torch.float32",
    ),
    "all_reduce_coalesced": (
        lambda rank, size: dist.all_reduce_coalesced([ones(4)] * (1 + rank)),
        r"rank 0 at all_reduce_coalesced of 4 torch.float32; rank 1 at all_reduce_coalesced of 4 torch.float32 \+ 4",
    ),
    "all_gather_coalesced": (
        lambda rank, size: dist.all_gather_coalesced([ones(2 * size)], [ones(size)]),
        SIZES,
    ),
    "objects": (
        lambda rank, size: dist.broadcast_object_list([None] * size, 0),
        "rank 0 at broadcast_object_list of 4 objects from rank 0; rank 1 at broadcast_object_list of 8 objects",
    ),
    "the split": (
        lambda rank, size: dist.all_to_all_single(ones(8), ones(8), [4, 4], [4, 4] if rank else [2, 6]),
        "do not fit; nothing was exchanged. Rank 0 sends 2 elements to rank 0, which expects 4",
    ),
    "the rows of a split": (
        lambda rank, size: dist.all_to_all_single(torch.ones(2, 2 + rank), torch.ones(2, 2 + rank)),
        "Rank 0 sends 2 elements to rank 1, which expects 3",
    ),
    "the list of an exchange": (
        lambda rank, size: dist.all_to_all([ones(4), ones(4)], [ones(4), ones(5 if rank else 4)]),
        "Rank 1 sends 5 elements to rank 1, which expects 4",
    ),
    "the dtype of an exchange": (
        lambda rank, size: dist.all_to_all_single(*[ones(4, torch.int32 if rank else torch.float32)] * 2),
        "rank 0 at all_to_all_single of torch.float32; rank 1 at all_to_all_single of torch.int32",
    ),
}


def one_after_the_other():
    """Every case, and after each of them the group can still be used."""
    said, rank = {}, dist.get_rank()
    for name, (call, _) in CASES.items():
        with pytest.raises(CommError) as caught:
            call(rank, 8 if rank else 4)
        said[name] = str(caught.value)
        total = ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
    return said


def test_all_ranks_are_told_what_does_not_fit_and_nothing_is_exchanged(world):
    first, second = world(2).run(one_after_the_other)
    assert first == second
    for name, (_, pattern) in CASES.items():
        assert "nothing was exchanged" in first[name]
        assert re.search(pattern.replace("{}", name), first[name]), first[name]
        if "exchange do not fit" not in first[name]:
            assert first[name].startswith(PARTED)


def in_a_group_of_some():
    rank = dist.get_rank()
    pair = dist.new_group([0, 2])
    if rank == 1:
        return ""
    with pytest.raises(CommError) as caught:
        dist.all_reduce(ones(1 + rank), group=pair)
    return str(caught.value)


def test_ranks_of_a_group_are_named_as_in_the_job(world):
    first, _, last = world(3).run(in_a_group_of_some)
    assert first == last == f"{PARTED}rank 0 at all_reduce of 1 torch.float32; rank 2 at all_reduce of 3 torch.float32"


def overlapping():
    """Operations that are not waited for at once may be started in any order relative to other groups and messages."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    totals = [ones(1), ones(1)]
    works = [dist.all_reduce(totals[each], group=groups[each], async_op=True) for each in ((0, 1) if rank else (1, 0))]
    if rank == 0:
        dist.send(ones(1), 1)
    else:
        dist.recv(ones(1), 0)
    for work in works:
        work.wait()
    return [total.item() for total in totals]


def test_what_goes_on_beside_the_program_waits_for_nobody_at_its_start(world):
    assert world(2).run(overlapping) == [[2.0, 2.0]] * 2


def short_list(operation):
    dist.set_patience(look=0.5, beat=0.2, silence=20)
    rank = dist.get_rank()
    with pytest.raises(RuntimeError) as caught:
        if operation == "all_gather_object":
            dist.all_gather_object([None] * (2 - rank), rank)
        else:
            dist.gather_object(rank, [None] if rank else None, 1)
    if rank == 1:
        time.sleep(2)  # the other rank is still to be told
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("operation", ["all_gather_object", "gather_object"])
def test_a_list_without_a_place_for_each_rank_is_refused_and_the_others_told(world, operation):
    (kind, words), (own_kind, own) = world(2).run(short_list, operation)
    assert (kind, own_kind) == (CommError, UsageError)
    assert own == f"{operation}: the list has 1 places, and the group 2 ranks"
    assert f"rank 1 failed in it: UsageError: {own}" in words


def no_tensor():
    with pytest.raises(UsageError, match="all_reduce: a tensor is wanted; this is a list"):
        dist.all_reduce([ones(1)])
    return True


def test_what_is_no_tensor_is_refused(world):
    assert world(2).run(no_tensor) == [True, True]
