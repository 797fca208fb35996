"""Every collective, message and query of `mizzen.comm` on gloo ranks, also in groups and asynchronously."""

import inspect
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist

import mizzen.comm as dist
from mizzen.ambient import AMBIENT
from mizzen.errors import CommError, NotBuilt, UsageError

SUM = dist.ReduceOp.SUM


def every_collective(is_async):
    """Each one's result on this rank, as plain lists; `is_async` starts them first and waits afterwards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.tensor([float(rank), 10.0 + rank])
    found = {}

    def done(name, work, result):
        assert (work is None) is not is_async, name
        if is_async:
            assert work.wait() is True
            assert work.is_completed()
        found[name] = [part.tolist() for part in result] if isinstance(result, list) else result.tolist()

    tensor = mine.clone()
    done("all_reduce", dist.all_reduce(tensor, async_op=is_async), tensor)
    tensor = mine.clone()
    done("max", dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=is_async), tensor)
    tensor = mine.clone()
    work = dist.reduce(tensor, dst=1, async_op=is_async)
    done("reduce", work, tensor if rank == 1 else torch.zeros(0))
    tensor = mine.clone()
    done("broadcast", dist.broadcast(tensor, src=1, async_op=is_async), tensor)
    parts = [torch.zeros(2) for _ in range(size)]
    done("all_gather", dist.all_gather(parts, mine, async_op=is_async), parts)
    whole = torch.zeros(2 * size)
    done("all_gather_into_tensor", dist.all_gather_into_tensor(whole, mine, async_op=is_async), whole)
    out = torch.zeros(2)
    inputs = [mine + 100 * place for place in range(size)]
    done("reduce_scatter", dist.reduce_scatter(out, inputs, async_op=is_async), out)
    out = torch.zeros(2)
    done("reduce_scatter_tensor", dist.reduce_scatter_tensor(out, torch.cat(inputs), async_op=is_async), out)
    whole = torch.zeros(2 * size)
    done("all_to_all_single", dist.all_to_all_single(whole, torch.cat(inputs), async_op=is_async), whole)
    parts = [torch.zeros(2) for _ in range(size)]
    done("all_to_all", dist.all_to_all(parts, inputs, async_op=is_async), parts)
    parts = [torch.zeros(2) for _ in range(size)] if rank == 1 else None
    done("gather", dist.gather(mine, parts, dst=1, async_op=is_async), parts or [])
    out = torch.zeros(2)
    done("scatter", dist.scatter(out, inputs if rank == 0 else None, async_op=is_async), out)
    tensors = [mine.clone(), torch.ones(3) * rank]
    done("all_reduce_coalesced", dist.all_reduce_coalesced(tensors, async_op=is_async), tensors)
    wholes = [torch.zeros(2 * size), torch.zeros(size)]
    work = dist.all_gather_coalesced(wholes, [mine, torch.ones(1) * rank], async_op=is_async)
    done("all_gather_coalesced", work, wholes)
    lists = [[torch.zeros(2), torch.zeros(1)] for _ in range(size)]
    done("in lists", dist.all_gather_coalesced(lists, [mine, mine[:1]], async_op=is_async), sum(lists, []))
    done("barrier", dist.barrier(async_op=is_async), torch.zeros(0))
    return found


def expected(rank, size):
    total = [float(sum(range(size))), float(sum(10 + r for r in range(size)))]
    every = [[float(r), 10.0 + r] for r in range(size)]
    flat = [number for pair in every for number in pair]
    scattered = [number + 100 * rank * size for number in total]
    exchanged = [[number + 100 * rank for number in pair] for pair in every]
    return {
        "all_reduce": total,
        "max": every[-1],
        "reduce": total if rank == 1 else [],
        "broadcast": every[1],
        "all_gather": every,
        "all_gather_into_tensor": flat,
        "reduce_scatter": scattered,
        "reduce_scatter_tensor": scattered,
        "all_to_all_single": [number for pair in exchanged for number in pair],
        "all_to_all": exchanged,
        "gather": every if rank == 1 else [],
        "scatter": [100.0 * rank, 10.0 + 100 * rank],
        "all_reduce_coalesced": [total, [float(sum(range(size)))] * 3],
        "all_gather_coalesced": [flat, [float(r) for r in range(size)]],
        "in lists": [part for pair in every for part in (pair, pair[:1])],
        "barrier": [],
    }


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_every_collective_gives_the_right_numbers(world, size, is_async):
    for rank, found in enumerate(world(size).run(every_collective, is_async)):
        assert found == expected(rank, size)


def collectives_in_groups():
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2], group_desc="even"), dist.new_group([1, 3])]
    mine, other = pairs[rank % 2], pairs[1 - rank % 2]
    tensor = torch.tensor([1.0 + rank])
    dist.all_reduce(tensor, group=mine)
    from_second = torch.tensor([float(rank)])
    dist.broadcast(from_second, group_src=1, group=mine)
    outside = torch.tensor([5.0])
    nothing = dist.all_reduce(outside, group=other, async_op=True)
    answer = {
        "sum": tensor.item(),
        "second": from_second.item(),
        "outside": (outside.item(), nothing),
        "rank": (dist.get_rank(mine), dist.get_rank(other)),
        "size": (dist.get_world_size(mine), dist.get_world_size(other)),
        "global": [dist.get_global_rank(mine, place) for place in range(2)],
        "all": dist.get_all_ranks_from_group(mine),
        "title": str(AMBIENT.comm.backend.group(mine)),
    }
    dist.destroy_process_group(mine)
    dist.barrier()
    return answer


def test_groups_have_their_own_ranks_sizes_and_results(world):
    results = world(4).run(collectives_in_groups)
    for rank, answer in enumerate(results):
        members = [rank % 2, rank % 2 + 2]
        assert answer["sum"] == sum(1 + member for member in members)
        assert answer["second"] == members[1]
        assert answer["outside"] == (5.0, None)
        assert answer["rank"] == (rank // 2, -1)
        assert answer["size"] == (2, -1)
        assert answer["global"] == answer["all"] == members
    assert results[0]["title"] == "group 'even' of ranks 0, 2"
    assert results[1]["title"] == "the group of ranks 1, 3"


def uneven_exchange():
    rank = dist.get_rank()
    send, receive = ([1, 3], [1, 2]) if rank == 0 else ([2, 0], [3, 0])
    out = torch.zeros(sum(receive))
    dist.all_to_all_single(out, torch.arange(float(sum(send))) + 10 * rank, receive, send)
    return out.tolist()


def test_all_to_all_single_takes_uneven_splits(world):
    assert world(2).run(uneven_exchange) == [[0.0, 10.0, 11.0], [1.0, 2.0, 3.0]]


def messages():
    rank = dist.get_rank()
    found = {}
    if rank == 0:
        box = torch.zeros(3)
        work = dist.irecv(box, src=1, tag=7)
        found["before"] = work.is_completed()
        dist.send(torch.ones(2), dst=1)
        found["wait"] = work.wait(), work.is_completed(), box.tolist()
        found["any"] = dist.recv(box), box.tolist()
        found["from"] = dist.recv(box, group_src=1)
    else:
        box = torch.zeros(2)
        dist.recv(box, src=0)
        time.sleep(0.3)
        work = dist.isend(torch.arange(3.0), dst=0, tag=7)
        found["sent"] = work.wait()
        dist.send(torch.full((3,), 4.0), group_dst=0)
        dist.send(torch.zeros(3), 0)
        found["box"] = box.tolist()
    return found


def test_messages_do_not_block_when_they_are_started(world):
    first, second = world(2).run(messages)
    # Rank 1 sends only after it has got what rank 0 sends after its irecv: a blocking irecv would never return.
    assert first["before"] is False
    assert first["wait"] == (True, True, [0.0, 1.0, 2.0])
    assert first["any"] == (1, [4.0, 4.0, 4.0])
    assert first["from"] == 1
    assert second == {"sent": True, "box": [1.0, 1.0]}


def isend_before_the_receiver_is_there():
    rank = dist.get_rank()
    big = torch.full((3_000_000,), float(rank))
    into = torch.empty_like(big)
    work = dist.isend(big, dst=1 - rank)  # both send first: with blocking sends of this size neither would go on
    dist.recv(into, src=1 - rank)
    work.wait()
    return into[0].item(), into[-1].item()


def test_two_ranks_may_send_first_and_receive_afterwards(world):
    assert world(2).run(isend_before_the_receiver_is_there) == [(1.0, 1.0), (0.0, 0.0)]


def objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    words = [{"rank": rank}, "x" * (10 + 90 * rank)]
    dist.broadcast_object_list(words, src=1)
    gathered = [None] * size
    dist.all_gather_object(gathered, ("object", rank))
    collected = [None] * size if rank == 0 else None
    dist.gather_object(rank, collected)
    mine = [None]
    dist.scatter_object_list(mine, [f"for {place}" for place in range(size)] if rank == 0 else None)
    return words, gathered, collected, mine


def test_objects_travel(world):
    for rank, (words, gathered, collected, mine) in enumerate(world(2).run(objects)):
        assert words == [{"rank": 1}, "x" * 100]
        assert gathered == [("object", 0), ("object", 1)]
        assert collected == ([0, 1] if rank == 0 else None)
        assert mine == [f"for {rank}"]


def gather_much(size: int, dtype: torch.dtype, shift: int) -> list[bool]:
    """Chunks above and below what is worth a broadcast from every rank; in place and apart."""
    rank, found = dist.get_rank(), []
    for numel in (3, 70_001):
        expected = torch.cat([torch.arange(numel) % 120 + place for place in range(size)]).to(dtype)
        mine = expected[rank * numel : (rank + 1) * numel].clone()
        whole = torch.zeros(size * numel + shift, dtype=dtype)[shift:]
        work = dist.all_gather_into_tensor(whole, mine, async_op=True)
        work.wait()
        found.append(torch.equal(whole, expected) and work.is_completed())
        whole.zero_()
        place = whole[rank * numel : (rank + 1) * numel]
        place.copy_(mine)
        dist.all_gather_into_tensor(whole, place)
        found.append(torch.equal(whole, expected))
    return found


@pytest.mark.parametrize(("dtype", "shift"), [(torch.float32, 0), (torch.bfloat16, 3), (torch.int8, 1)])
@pytest.mark.parametrize("size", [2, 3])
def test_large_tensors_are_gathered_too(world, size, dtype, shift):
    assert all(all(found) for found in world(size).run(gather_much, size, dtype, shift))


def queries():
    group = dist.new_group(timeout=timedelta(seconds=17), backend="gloo")
    facts = AMBIENT.comm.backend.group(group)
    answer = {
        "initialized": dist.is_initialized() and dist.is_available(),
        "rank": (dist.get_rank(), dist.get_local_rank(), dist.get_world_size()),
        "backend": (dist.get_backend(), dist.get_backend(group)),
        "world": dist.get_world_group() is torch_dist.group.WORLD,
        "timeout": facts.timeout,
    }
    dist.set_backend("gloo")
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    dist.destroy_process_group()
    answer["after"] = dist.is_initialized(), torch_dist.is_initialized(), AMBIENT.comm
    return answer


def test_questions_are_answered(world, monkeypatch):
    monkeypatch.setenv("MIZZEN_ACCELERATOR", "cpu")
    for rank, answer in enumerate(world(2).run(queries)):
        assert answer == {
            "initialized": True,
            "rank": (rank, rank, 2),
            "backend": ("gloo", "gloo"),
            "world": True,
            "timeout": 17.0,
            "after": (False, False, None),
        }


def by_names_of_torch():
    rank = dist.get_rank()
    scattered, exchanged, mine = torch.zeros(1), torch.zeros(2), torch.arange(2.0) + 10 * rank
    dist.reduce_scatter_tensor(output=scattered, input=mine)
    dist.all_to_all_single(output=exchanged, input=mine)
    try:
        ranks = dist.get_all_ranks_from_group(dist.new_group(ranks=[1, 0], sort_ranks=False))
    except NotBuilt:
        ranks = [1, 0] if "sort_ranks" not in inspect.signature(torch_dist.new_group).parameters else None
    return scattered.tolist(), exchanged.tolist(), ranks


def test_arguments_have_the_names_of_torch(world):
    assert world(2).run(by_names_of_torch) == [([10.0], [0.0, 10.0], [1, 0]), ([12.0], [1.0, 11.0], [1, 0])]


def a_barrier_with_a_limit():
    store = torch_dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["told"])
        return None
    with pytest.raises(CommError, match=r"barrier .*the limit is 0\.3 s; 1 of 1 peers") as caught:
        dist.barrier(timeout=timedelta(seconds=0.3))
    store.set("told", b"")
    return caught.type


def test_a_barrier_waits_as_long_as_it_is_told(world):
    assert world(2).run(a_barrier_with_a_limit) == [CommError, None]


def barrier_devices():
    """What torch itself is given for `device_ids`."""
    seen = []
    real = torch_dist.ProcessGroup.barrier

    def spy(self, opts):
        seen.append(opts.device_ids)
        return real(self, opts=opts)

    torch_dist.ProcessGroup.barrier = spy
    dist.barrier(device_ids=[0])
    return seen


def test_barrier_passes_its_device_ids_on(world):
    assert world(2).run(barrier_devices) == [[[0]], [[0]]]


def wrong_calls():
    tensor = torch.ones(1)
    said = []
    for call in (
        lambda: dist.broadcast(tensor),
        lambda: dist.broadcast(tensor, src=0, group_src=0),
        lambda: dist.get_global_rank(None, 5),
        lambda: dist.all_reduce(tensor, colour="red"),
        lambda: dist.all_reduce(tensor.to(torch.float8_e4m3fn)),
        lambda: dist.send(tensor, dst=9),
        lambda: dist.set_backend("none such"),
    ):
        with pytest.raises((UsageError, TypeError, RuntimeError, ValueError)) as caught:
            call()
        said.append((caught.type.__name__, str(caught.value)))
    dist.all_reduce(tensor)  # a refused call does no harm to the next
    return said, tensor.item()


def test_wrong_calls_are_named_and_do_no_harm(world):
    for said, total in world(2).run(wrong_calls):
        assert said[0] == ("UsageError", "broadcast needs a rank to send to or to come from")
        assert said[1] == ("UsageError", "broadcast: give a rank (0) or a place in the group (0), not both")
        assert said[2] == ("UsageError", "the group has 2 ranks; there is no place 5 in it")
        assert said[3] == ("TypeError", "all_reduce() got an unexpected keyword argument 'colour'")
        assert said[4][0] == "CommError"  # and out of this call, not out of the next
        assert "Invalid scalar type" in said[4][1]
        assert said[5] == ("UsageError", "isend: rank 9 is not in all ranks, which has ranks 0, 1")
        assert said[6][1].startswith("backend 'none such' is not initialized")
        assert total == 2.0


def new_world_after_the_old():
    first = dist.get_world_size(), AMBIENT.comm
    dist.all_reduce(torch.ones(1))
    torch_dist.destroy_process_group()  # not by us: the user's own call
    assert not dist.is_initialized()
    with pytest.raises(UsageError, match=r"init_distributed\(\) first"):
        dist.all_reduce(torch.ones(1))
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return first[0], dist.get_world_size(), AMBIENT.comm is not first[1], tensor.item()


def test_a_new_process_group_replaces_the_old(world):
    assert world(2).run(new_world_after_the_old) == [(2, 1, True, 1.0)] * 2


def one_rank():
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.barrier()
    gathered = [None]
    dist.all_gather_object(gathered, "alone")
    return tensor.tolist(), gathered, AMBIENT.comm.watchdog._status_thread


def test_one_rank_needs_no_watching(world):
    assert world(1).run(one_rank) == [([1.0, 1.0], ["alone"], None)]


def coming_and_going():
    """What the record of this process says around a collective."""
    from mizzen.progress import get_progress

    before = get_progress().record
    dist.barrier()
    dist.all_reduce(torch.ones(1))
    after = get_progress().record
    return before.number, after.number, after.collective, after.group, after.waiting


def test_the_progress_record_names_the_last_collective(world):
    assert world(2).run(coming_and_going) == [(0, 2, "all_reduce", "all ranks", False)] * 2


def exchanged():
    """Each rank sends two tensors to the next one, numbered against the order, and waits for both as one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    there, back = (rank + 1) % size, (rank - 1) % size
    sent = [torch.full((3,), 10.0 * rank), torch.tensor([rank], dtype=torch.int64)]
    found = [torch.empty(3), torch.empty(1, dtype=torch.int64)]
    messages = [dist.PeerMessage(sent[number], there, number, is_sent=True) for number in (1, 0)]
    messages += [dist.PeerMessage(found[number], back, number, is_sent=False) for number in (0, 1)]
    work = dist.exchange(messages, what="a test")
    assert work.wait() is True and work.is_completed()
    assert dist.exchange([]) is None
    return [each.tolist() for each in found]


def test_messages_meet_by_their_numbers(world):
    for rank, (first, second) in enumerate(world(3).run(exchanged)):
        before = (rank - 1) % 3
        assert first == [10.0 * before] * 3 and second == [before]


def addressed_to_nobody():
    """Messages to a rank that there is not, for which torch would end the process."""
    nobody, tensor, found = dist.PeerMessage(torch.ones(1), 7, 0, is_sent=True), torch.ones(1), []
    for start in (lambda: dist.exchange([nobody]), lambda: dist.send(tensor, 7), lambda: dist.recv(tensor, 7)):
        try:
            start()
        except UsageError as error:
            found.append(str(error))
    return found


def test_a_message_to_nobody_is_refused(world):
    refused = [f"{name}: rank 7 is not in all ranks, which has ranks 0, 1" for name in ("exchange", "isend", "irecv")]
    assert world(2).run(addressed_to_nobody) == [refused] * 2
