"""A backend of somebody else, registered by name: collectives over a key-value store, without any process group."""

import os
import signal
import socket
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist

import mizzen.comm as dist
from mizzen.ambient import AMBIENT
from mizzen.comm.backend import Group, register_backend
from mizzen.comm.report import comm_log
from mizzen.errors import CommError, NotBuilt, UsageError


class Posted:
    """What every rank has posted under one key; done when all are there."""

    def __init__(self, store, keys, finish):
        self.store, self.keys, self.finish, self.is_abandoned = store, keys, finish, False

    def is_completed(self):
        return self.store.check(self.keys)

    def poll(self, seconds):
        until = time.monotonic() + seconds
        while not self.is_completed():
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        self.finish([self.store.get(key) for key in self.keys])
        return True

    def abandon(self):
        self.is_abandoned = True


class StoreBackend:
    """Slow and simple: every rank posts its bytes, and each works out the result."""

    name = "toy"

    def __init__(self):
        self.client, self.world, self.issued, self.groups = None, None, Counter(), []

    def initialize(self, world, *, timeout, init_method=None, device=None):
        port = world.master_port
        self.client = torch_dist.TCPStore(world.master_addr, port, world.size, world.rank == 0, timeout=timeout)
        self.world = world

    def is_initialized(self):
        return self.client is not None

    def store(self):
        return torch_dist.PrefixStore("news", self.client.clone())

    def group(self, handle):
        ranks = tuple(range(self.world.size)) if handle is None else handle
        if self.world.rank not in ranks:
            return None
        return Group(str(ranks), ranks, ranks.index(self.world.rank), f"toy group {ranks}")

    def new_group(self, ranks, timeout, options):
        self.groups.append((timeout, options["group_desc"]))
        return tuple(ranks)

    def issue(self, request, handle):
        group = self.group(handle)
        self.issued[group.name] += 1
        finish = getattr(self, f"_{request.operation}", None)
        if finish is None:
            raise NotBuilt(f"the toy cannot do {request.operation}")
        tensor = request.payload[0] if request.payload else torch.zeros(1)
        keys = [f"{group.name}/{self.issued[group.name]}/{rank}" for rank in group.ranks]
        self.client.set(keys[group.rank], tensor.numpy().tobytes())
        return Posted(self.client, keys, lambda posted: finish(request, tensor, posted))

    def destroy(self, handle):
        """Rank 0 serves the store, so it leaves last: the others may still be reading what it posted."""
        if handle is not None:
            return
        self.client.set(f"left/{self.world.rank}", "")
        if self.world.rank == 0:
            self.client.wait([f"left/{rank}" for rank in range(self.world.size)], timedelta(seconds=10))
        self.client = None

    def _all_reduce(self, request, tensor, posted):
        tensor.copy_(sum(torch.frombuffer(bytearray(data), dtype=tensor.dtype) for data in posted).view_as(tensor))

    def _broadcast(self, request, tensor, posted):
        tensor.copy_(torch.frombuffer(bytearray(posted[request.arguments[1]]), dtype=tensor.dtype).view_as(tensor))

    def _all_gather_into_tensor(self, request, tensor, posted):
        into = request.arguments[0]
        into.copy_(torch.cat([torch.frombuffer(bytearray(data), dtype=tensor.dtype) for data in posted]).view_as(into))

    def _barrier(self, request, tensor, posted):
        pass


def join():
    register_backend("toy", StoreBackend)
    dist.init_distributed("toy", timeout=timedelta(seconds=20), verbose=False)
    return AMBIENT.comm.backend


def used():
    backend = join()
    rank = dist.get_rank()
    tensor = torch.tensor([1.0 + rank, 2.0])
    dist.all_reduce(tensor)
    copy = torch.tensor([rank])
    work = dist.broadcast(copy, src=1, async_op=True)
    waited = work.wait(), work.is_completed()
    pair = dist.new_group([0, 2], timeout=timedelta(seconds=3), group_desc="pair")
    some = torch.ones(1)
    dist.all_reduce(some, group=pair)
    with pytest.raises(NotBuilt, match="the toy cannot do scatter"):
        dist.scatter(torch.ones(1))
    with pytest.raises(CommError, match="the ranks have parted ways"):
        dist.all_reduce(torch.ones(1), tag=dist.Tag(rank, "unit", "phase"))
    dist.configure(enabled=True)
    dist.barrier()
    answer = {
        "tensor": tensor.tolist(),
        "copy": copy.item(),
        "waited": waited,
        "some": some.item(),
        "size": (dist.get_world_size(), dist.get_world_size(pair)),
        "torch": (torch_dist.is_initialized(), dist.is_initialized(), dist.get_backend(), dist.get_world_group()),
        "groups": backend.groups,
        "log": list(comm_log().records),
    }
    dist.barrier()
    dist.destroy_process_group()
    answer["after"] = dist.is_initialized()
    return answer


def test_a_registered_backend_carries_the_collectives(world):
    for rank, answer in enumerate(world(3, init=False).run(used)):
        assert answer == {
            "tensor": [6.0, 6.0],
            "copy": 1,
            "waited": (True, True),
            "some": 2.0 if rank in (0, 2) else 1.0,
            "size": (3, 2 if rank in (0, 2) else -1),
            "torch": (False, True, "toy", None),
            "groups": [(timedelta(seconds=3), "pair")],
            "log": ["barrier"],
            "after": False,
        }


def parted():
    join()
    dist.set_patience(look=0.5, beat=0.2, silence=20)
    dist.barrier()
    time.sleep(0.5)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError) as caught:
        dist.all_reduce(torch.ones(1))
    return str(caught.value)


def test_its_waits_end_as_well(world):
    survivor, _ = world(2, init=False).run(parted, expect_failure=True, grace=30)
    assert survivor.error_type is None, survivor.traceback
    assert "rank 1 was killed or has crashed" in survivor.value


def not_initialized():
    register_backend("toy", StoreBackend)
    with pytest.raises(UsageError, match=r"backend 'toy' is not initialized: call mizzen.init_distributed"):
        dist.set_backend("toy")
    before = AMBIENT.comm
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    ready = StoreBackend()
    from mizzen.environment import World, environ

    there = World.detect(environ())
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = [holder.getsockname()[1]]
    torch_dist.broadcast_object_list(port)
    ready.initialize(replace(there, master_port=port[0]), timeout=timedelta(seconds=10))
    register_backend("toy", lambda: ready)
    dist.set_backend("toy")
    dist.all_reduce(tensor)
    return before, tensor.item(), dist.get_backend(), ready.issued.total()


def test_a_backend_that_is_ready_can_be_switched_to(world):
    assert world(2).run(not_initialized) == [(None, 4.0, "toy", 1)] * 2
