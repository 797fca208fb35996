"""The seam: values, registration, and how torch's own operations are waited for."""

import threading
import time
from collections import deque
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mizzen.ambient import AMBIENT
from mizzen.comm.backend import Group, Request, register_backend, registered_backend
from mizzen.comm.join import init_distributed
from mizzen.comm.torch_backend import (
    Finished,
    Sliced,
    Streamed,
    Threaded,
    TorchBackend,
    Waiters,
    check_name,
    make_backend,
)
from mizzen.environment import World
from mizzen.errors import NotBuilt, UsageError


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_titles():
    assert Request("all_reduce").title == "all_reduce"
    assert Request("reduce", detail="to rank 1").title == "reduce to rank 1"
    assert str(Group("5", (1, 2), 0, "group 'tp'")) == "group 'tp'"


def test_a_registered_name_comes_before_torch(monkeypatch):
    monkeypatch.setattr(AMBIENT, "backends", {})
    assert registered_backend("ccl") is None
    assert isinstance(make_backend("ccl"), TorchBackend)

    class Mine:
        name = "ccl"

    register_backend("ccl", Mine)
    assert isinstance(registered_backend("ccl"), Mine)
    assert isinstance(make_backend("ccl"), Mine)
    assert isinstance(make_backend(None), TorchBackend)
    assert make_backend("gloo").name == "gloo"


@pytest.mark.parametrize("name", ["nosuch", "cpu:gloo,cuda:nosuch", 3])
def test_a_backend_that_nobody_has_is_refused_with_those_that_are_there(monkeypatch, name):
    monkeypatch.setattr(AMBIENT, "backends", {"ccl": object})
    with pytest.raises(UsageError, match=f"no backend {name!r} .* have ccl, fake, gloo.*register_backend"):
        init_distributed(dist_backend=name)
    check_name("GLOO")
    check_name("cpu:gloo")


def test_a_backend_belongs_to_the_process_group_that_it_found(one_rank):
    backend = TorchBackend()
    assert backend.is_initialized()
    assert backend.name == "gloo"
    assert backend.group(None) == Group("0", (0,), 0, "all ranks")
    assert backend.store() is None  # nobody to tell anything
    backend.destroy(None)
    assert not backend.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert not backend.is_initialized()
    assert TorchBackend().is_initialized()


def test_a_backend_can_make_the_process_group(tmp_path):
    backend = TorchBackend("gloo")
    assert not backend.is_initialized()
    backend.initialize(World(), timeout=timedelta(seconds=5), init_method=f"file://{tmp_path}/store")
    assert backend.is_initialized()
    backend.destroy(None)


def test_each_kind_of_operation_has_its_handle(one_rank):
    backend = TorchBackend()
    tensor = torch.ones(2)
    assert isinstance(backend.issue(Request("all_reduce", (tensor,), payload=(tensor,)), None), Sliced)
    assert isinstance(backend.issue(Request("all_gather_object", ([None], "x")), None), Threaded)
    with pytest.raises(NotBuilt, match="no operation 'all_shuffle'; there are all_gather, "):
        backend.issue(Request("all_shuffle"), None)


def test_what_is_not_gloo_is_waited_for_as_torch_does(monkeypatch, one_rank):
    backend = TorchBackend()
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    tensor = torch.ones(2)
    assert isinstance(backend.issue(Request("all_reduce", (tensor,), payload=(tensor,)), None), Sliced)
    assert isinstance(backend.issue(Request("barrier"), None), Streamed)
    assert isinstance(backend.issue(Request("monitored_barrier", options={"timeout": None}), None), Streamed)
    backend = TorchBackend()
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:other")
    handle = backend.issue(Request("all_reduce", (tensor,), payload=(tensor,)), None)
    assert isinstance(handle, Streamed)
    assert handle.poll(0.0)
    objects = [None]
    handle = backend.issue(Request("all_gather_object", (objects, "x")), None)
    assert isinstance(handle, Finished)
    assert objects == ["x"]
    assert handle.poll(0.0)
    assert handle.is_completed()


class Slow:
    """A piece of torch's work that is done when the test says so."""

    def __init__(self, error=None):
        self.done, self.error, self.timeouts = False, error, []

    def wait(self, timeout):
        self.timeouts.append(timeout)
        if not self.done:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise self.error
        return True

    def is_completed(self):
        return self.done


def test_a_slice_that_ends_too_early_is_no_error():
    work = Slow()
    handle = Sliced(work, object())
    assert handle.poll(0.5) is False
    work.done = True
    assert handle.poll(0.5) is True
    assert handle.is_completed()
    failed = Slow(RuntimeError("Connection closed by peer"))
    failed.done = True
    with pytest.raises(RuntimeError, match="closed by peer"):
        Sliced(failed, object()).poll(0.5)


def test_what_ends_together_with_its_slice_has_not_failed():
    class Late(Slow):
        def is_completed(self):
            self.done = True
            return True

    assert Sliced(Late(), object()).poll(0.5) is True
    with pytest.raises(RuntimeError, match="closed by peer"):
        Sliced(Late(RuntimeError("Connection closed by peer")), object()).poll(0.5)


def test_a_slice_is_never_endless():
    work = Slow()
    for seconds in (0.0, 0.0001, -1.0):
        Sliced(work, object()).poll(seconds)
    assert work.timeouts == [timedelta(milliseconds=1)] * 3  # torch takes zero for no limit at all


def test_another_thread_waits_for_what_cannot_be_sliced():
    gate = threading.Event()
    handle = Threaded(gate.wait, object())
    assert handle.poll(0.01) is False
    assert not handle.is_completed()
    gate.set()
    assert handle.poll(5.0) is True
    assert handle.is_completed()


def wait_in(waiters, call, idle=1):
    assert Threaded(call, object(), waiters=waiters).poll(5.0) is True
    for _ in range(500):  # the thread comes back a moment after the call has ended
        if len(waiters._idle) == idle:
            return
        time.sleep(0.01)


def test_a_thread_that_is_free_waits_for_the_next_call_and_one_that_is_stuck_is_left_behind():
    waiters, gate, seen = Waiters(), threading.Event(), []

    def note():
        seen.append(threading.current_thread())

    wait_in(waiters, note)
    wait_in(waiters, note)
    stuck = Threaded(gate.wait, object(), waiters=waiters)
    assert stuck.poll(0.01) is False
    wait_in(waiters, note)
    assert seen[0] is seen[1] is not seen[2]
    gate.set()
    assert stuck.poll(5.0) is True
    wait_in(waiters, note, idle=2)
    del waiters, stuck
    seen[-1].join(5.0)
    assert not seen[-1].is_alive()


class TakenMeanwhile(deque):
    """Threads of which another caller takes the last one right after somebody has looked."""

    def __bool__(self):
        self.clear()
        return True


def test_a_free_thread_that_another_caller_takes_first_is_no_error():
    waiters = Waiters()
    waiters._idle = TakenMeanwhile()
    assert Threaded(lambda: None, object(), waiters=waiters).poll(5.0) is True


def test_the_error_of_the_other_thread_is_raised_here():
    def fail():
        raise KeyError("there")

    handle = Threaded(fail, object())
    for _ in range(2):
        with pytest.raises(KeyError, match="there"):
            handle.poll(5.0)


def test_an_abandoned_operation_keeps_its_group():
    import sys

    for make in (lambda group: Sliced(Slow(), group), lambda group: Threaded(lambda: None, group)):
        group = object()
        before = sys.getrefcount(group)
        handle = make(group)
        handle.abandon()
        del handle
        assert sys.getrefcount(group) == before + 1
