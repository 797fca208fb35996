"""Tagged collectives: ranks that parted ways are told so before anything is exchanged, and nobody is aborted."""

import re
import time
from dataclasses import replace

import pytest
import torch

import mizzen.comm as dist
from mizzen.comm import Tag
from mizzen.comm.backend import Request
from mizzen.comm.communicator import compare_tags, current
from mizzen.comm.torch_backend import SideChannel
from mizzen.errors import CommError
from mizzen.progress import get_progress


def agreeing():
    rank = dist.get_rank()
    tag = Tag(2, "layers.0", "forward")
    tensor = torch.tensor([1.0 + rank])
    dist.all_reduce(tensor, tag=tag)
    whole = torch.zeros(2)
    work = dist.all_gather_into_tensor(whole, torch.tensor([float(rank)]), async_op=True, tag=Tag(2, "b", "forward"))
    work.wait()
    out = torch.zeros(1 + rank)
    splits = ([1, 0], [1, 1]) if rank == 0 else ([1, 1], [0, 1])
    dist.all_to_all_single(out, torch.arange(2.0 - rank) + 10 * rank, *splits, tag=Tag(2, "c", "forward"))
    dist.barrier(tag=Tag(2, "", "end"))
    record = get_progress().record
    return tensor.item(), whole.tolist(), out.tolist(), (record.step, record.phase), dist.take_parted()


def test_equal_tags_change_nothing(world):
    first, second = world(2).run(agreeing)
    assert first == (3.0, [0.0, 1.0], [0.0], (2, "end"), None)
    assert second == (3.0, [0.0, 1.0], [1.0, 10.0], (2, "end"), None)


def differing():
    """Rank 2 has skipped a block; the next collective of all has another size there. gloo would abort."""
    rank = dist.get_rank()
    unit, size = ("layers.1", 8) if rank == 2 else ("layers.0", 4)
    shard = torch.full((size,), float(rank))
    whole = torch.zeros(3 * size)
    with pytest.raises(CommError) as caught:
        dist.all_gather_into_tensor(whole, shard, tag=Tag(5, unit, "forward"))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, tag=Tag(6, "", ""))  # and the group can still be used
    return str(caught.value), whole.sum().item(), tensor.item()


def test_unequal_units_and_sizes_are_named_on_every_rank(world):
    for said, written, total in world(3).run(differing):
        assert said == (
            "the ranks have parted ways; nothing was exchanged. "
            "ranks 0, 1 at step 5, unit 'layers.0', phase 'forward': all_gather_into_tensor of 4 torch.float32; "
            "rank 2 at step 5, unit 'layers.1', phase 'forward': all_gather_into_tensor of 8 torch.float32"
        )
        assert (written, total) == (0.0, 3.0)


def other_operation_or_dtype():
    rank = dist.get_rank()
    said = []
    tag = Tag(1, "head", "backward")
    with pytest.raises(CommError) as caught:
        tensor = torch.ones(4)
        dist.all_reduce(tensor, tag=tag) if rank == 0 else dist.broadcast(tensor, src=0, tag=tag)
    said.append(str(caught.value))
    with pytest.raises(CommError) as caught:
        dist.all_reduce(torch.ones(4, dtype=torch.float32 if rank == 0 else torch.float64), tag=tag)
    said.append(str(caught.value))
    with pytest.raises(CommError) as caught:
        dist.all_reduce(torch.ones(4), tag=Tag(rank, "head", "backward"))
    said.append(str(caught.value))
    return said


def test_other_operations_types_and_steps_are_named(world):
    first, second = world(2).run(other_operation_or_dtype)
    assert first == second
    assert "rank 0 at step 1, unit 'head', phase 'backward': all_reduce of 4" in first[0]
    assert "rank 1 at step 1, unit 'head', phase 'backward': broadcast from rank 0 of 4" in first[0]
    assert "torch.float64" in first[1]
    assert "rank 0 at step 0" in first[2]
    assert "rank 1 at step 1" in first[2]


def tag_in_a_group():
    rank = dist.get_rank()
    pair = dist.new_group([1, 3])
    if rank in (1, 3):
        with pytest.raises(CommError) as caught:
            dist.all_reduce(torch.ones(1), group=pair, tag=Tag(rank, "x", "y"))
        return str(caught.value)
    return dist.all_reduce(torch.ones(1), group=pair, tag=Tag(0, "x", "y"))


def test_a_group_names_global_ranks(world):
    outside, first, _, second = world(4).run(tag_in_a_group)
    assert outside is None
    assert first == second
    assert "rank 1 at step 1" in first
    assert "rank 3 at step 3" in first


def trails(kinds):
    """Leave tags as collectives on a device do, in the order that this rank is given, and compare."""
    communicator = current()
    for unit in kinds[dist.get_rank()]:
        request = Request("exchange", (), payload=(torch.empty(4, device="meta"),))
        communicator.compare_call(request, None, Tag(1, unit, "forward"))
    (trail,) = communicator._tag_hashes.values()
    communicator._tag_hashes[None] = replace(trail, device=torch.device("cpu"))  # where gloo can compare them
    return bool(dist.take_parted()), dist.take_parted()


@pytest.mark.parametrize(("kinds", "differ"), [(("ab", "ab"), False), (("ab", "ba"), True), (("ab", "a"), True)])
def test_trails_differ_when_anything_on_the_way_did(world, kinds, differ):
    assert world(2).run(trails, kinds) == [(differ, None)] * 2


def train(steps, *, sizes=(4, 8, 4)):
    """Some steps whose calls are the same in each."""
    for step in steps:
        for unit, size in enumerate(sizes):
            whole = torch.zeros(2 * size)
            work = dist.all_gather_into_tensor(
                whole, torch.full((size,), dist.get_rank() + 1.0), async_op=True, tag=Tag(step, str(unit), "forward")
            )
            work.wait()
            assert whole.tolist() == [1.0] * size + [2.0] * size
        compare_tags(Tag(step, "", "end"), None, torch.empty(0))


def messages():
    """How many messages of gloo a step takes, in the group itself and beside it."""
    counts, backend = [], current().backend
    issue, gather = backend.issue, SideChannel.all_gather
    counted = {"group": 0, "beside": 0}

    def count(where, call):
        def counting(*args):
            counted[where] += 1
            return call(*args)

        return counting

    backend.issue = count("group", issue)
    SideChannel.all_gather = count("beside", gather)
    for step in range(5):
        counted.update(group=0, beside=0)
        train([step], sizes=(4, 8) if step == 4 else (4, 8, 4))
        counts.append(dict(counted))
    return counts


def test_calls_that_repeat_are_compared_once(world):
    for counts in world(2).run(messages):
        assert counts[0] == {"group": 7, "beside": 0}
        assert counts[3] == {"group": 3, "beside": 0}
        assert counts[4] == {"group": 2, "beside": 1}, "all ranks leave out a unit: only the call after it is compared"


def parting(how):
    """After steps that were alike, rank 1 does something else; rank 0 goes on."""
    dist.set_patience(look=0.3, beat=0.1)
    train(range(4))
    rank = dist.get_rank()
    ahead = rank == 0
    with pytest.raises(CommError) as caught:
        if how == "unit":
            train([4], sizes=(4, 8, 4) if ahead else (8, 4))
        elif how == "step":
            train([4 if ahead else 5])
        elif how == "operation":
            train([4]) if ahead else dist.all_reduce(torch.ones(4))
        else:  # rank 0 goes past the end of the step, at which nothing is exchanged, and waits in the next one
            for unit, size in enumerate((4, 8, 4)):
                work = dist.all_gather_into_tensor(
                    torch.zeros(2 * size), torch.ones(size), async_op=True, tag=Tag(4, str(unit), "forward")
                )
                work.wait()
            compare_tags(Tag(4, "", "end" if ahead else "another end"), None, torch.empty(0))
            train([5])
    said = str(caught.value)
    if rank == 1:
        with pytest.raises(CommError, match="nothing more can be exchanged in all ranks"):
            dist.all_reduce(torch.ones(1), async_op=True)
        time.sleep(2)  # the other rank is still to be told
    return said


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("unit", "step 4, unit '0', phase 'forward': all_gather_into_tensor of 8 torch.float32"),
        ("step", "step 5, unit '0', phase 'forward': all_gather_into_tensor of 4 torch.float32"),
        ("operation", "all_reduce of 4 torch.float32"),
        ("end", "step 4, unit '', phase 'another end': exchange of 0 torch.float32"),
    ],
)
def test_ranks_that_part_ways_after_steps_that_were_alike_are_both_told(world, how, where):
    first, second = world(2).run(parting, how)
    assert re.match(r"rank 0 waited \d+\.\d s in all_gather_into_tensor \(call \d+ of all ranks\): rank 1 ", first), (
        first
    )
    assert where in first
    assert re.match(
        rf"rank 1 waited \d+\.\d s in {re.escape(where)} \(call \d+ of all ranks\): rank 0 entered ", second
    )
    for said in (first, second):
        assert "the ranks have parted ways. rank 0 at step " in said
        assert f"; rank 1 at {where}" in said or how == "operation"


def changing():
    """Every rank does what was not agreed on, again and again: that is no error."""
    pair = dist.new_group([0, 1])
    for step in range(6):
        train([step], sizes=(4, 8) if step % 3 else (2,))
        total = torch.ones(1 + step % 2)
        dist.all_reduce(total, group=pair)
        assert total.tolist() == [2.0] * (1 + step % 2)
    dist.destroy_process_group(pair)
    train(range(6, 9))
    return True


def test_an_order_that_changes_on_all_ranks_is_followed(world):
    assert world(2).run(changing) == [True, True]
