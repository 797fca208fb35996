"""Collectives of device tensors: nothing may stop the host, tags included. One rank, because there is one device."""

import pytest
import torch
import torch.distributed as torch_dist

import mizzen.comm as dist
from mizzen.ambient import AMBIENT
from mizzen.comm.agreement import digest
from mizzen.comm.backend import Request, Tag
from mizzen.comm.tags import differ_on_device
from mizzen.comm.torch_backend import Sliced, Streamed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def one_rank(monkeypatch):
    for entry in ("comm", "comm_log"):
        monkeypatch.setattr(AMBIENT, entry, None)
    torch_dist.init_process_group("cpu:gloo,cuda:nccl", store=torch_dist.HashStore(), rank=0, world_size=1)
    yield
    if torch_dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def no_host_sync(one_rank):
    dist.all_reduce(torch.ones(1, device="cuda"))  # NCCL may synchronise while it sets itself up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_waits_are_left_to_the_stream(no_host_sync):
    tensor = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(tensor)
    work = dist.all_gather_into_tensor(torch.empty_like(tensor), tensor, async_op=True)
    assert work.wait() is True
    torch.cuda.set_sync_debug_mode("default")
    assert tensor.sum().item() == 1 << 20


def test_tags_are_compared_on_the_device(no_host_sync):
    tensor = torch.ones(8, device="cuda")
    dist.all_reduce(tensor, tag=Tag(1, "layers.0", "forward"))
    dist.reduce_scatter_tensor(torch.empty_like(tensor), tensor, tag=Tag(1, "layers.1", "backward"))
    flag = dist.take_parted()
    assert dist.take_parted() is None
    torch.cuda.set_sync_debug_mode("default")
    assert flag.device.type == "cuda"
    assert flag.item() is False


@pytest.mark.parametrize(("theirs", "differs"), [("here", False), ("there", True)])
def test_the_flag_says_whether_they_differ(theirs, differs):
    other = torch.tensor([digest(theirs), -digest(theirs)], device="cuda")
    flag = differ_on_device(
        digest("here"), torch.device("cuda"), lambda values: values.copy_(torch.maximum(values, other))
    )
    assert flag.item() is differs


def test_each_device_has_its_kind_of_wait(one_rank):
    dist.barrier()
    backend = AMBIENT.comm.backend
    for device, kind in (("cpu", Sliced), ("cuda", Streamed)):
        tensor = torch.ones(2, device=device)
        handle = backend.issue(Request("all_reduce", (tensor,), payload=(tensor,)), None)
        assert isinstance(handle, kind)
        assert handle.poll(5.0)


def test_objects_and_barriers_work_beside(one_rank):
    gathered = [None]
    dist.all_gather_object(gathered, {"a": 1})
    dist.barrier(device_ids=[0])
    dist.monitored_barrier()
    assert gathered == [{"a": 1}]


def test_the_log_times_the_device(one_rank):
    dist.configure(enabled=True)
    tensor = torch.ones(1 << 24, device="cuda")
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    row = dist.log_summary(show_straggler=True, return_dict=True)["summary"]["all_reduce"][1 << 26]
    assert row["count"] == 2
    assert row["total_latency_ms"] > 0


def test_a_group_of_devices_only_exchanges_there(one_rank):
    from mizzen.comm.groups import exchange_device

    assert exchange_device().type == "cpu"
    devices = dist.new_group(backend="nccl")
    assert exchange_device(devices).type == "cuda"
