import mmap

import pytest
import torch

from mizzen.accelerator import host
from mizzen.accelerator.cpu import Cpu
from mizzen.accelerator.streams import hold
from mizzen.errors import UsageError


@pytest.fixture
def cpu():
    return Cpu()


def test_it_is_always_there_and_has_one_device(cpu):
    assert cpu.unavailable() is None
    assert cpu.device() == cpu.device(3) == torch.device("cpu")
    assert (cpu.name, cpu.comm_backend, cpu.visible_devices) == ("cpu", "gloo", None)


def test_the_count_is_the_cores_or_local_size(cpu, monkeypatch):
    assert cpu.device_count() == host.cores()
    monkeypatch.setenv("LOCAL_SIZE", "7")
    assert cpu.device_count() == 7


def test_the_current_device_is_the_local_rank_as_a_number_until_set(monkeypatch):
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    cpu = Cpu()
    assert cpu.current_device() == 1
    cpu.set_device(100)
    assert cpu.current_device() == 100


def test_memory_follows_an_allocation_and_the_peak_outlives_it(cpu):
    before = cpu.memory()
    block = mmap.mmap(-1, 48 * 2**20, flags=mmap.MAP_PRIVATE)  # some allocators keep what a tensor gives back
    block.write(bytes([1]) * len(block))
    during = cpu.memory()
    assert during.allocated - before.allocated > 40 * 2**20
    block.close()
    after = cpu.memory()
    assert after.allocated < during.allocated - 40 * 2**20
    if after.peak is not None:
        assert after.peak > during.allocated - 8 * 2**20  # the kernel counts per core and adds up now and then
        cpu.reset_peak()
        assert cpu.memory().peak < during.allocated - 20 * 2**20


def test_the_capacity_is_larger_than_what_is_free(cpu):
    found = cpu.capacity()
    assert 0 < found.available <= found.total


def test_supported_types_are_those_that_compute(cpu):
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
        assert cpu.supports(dtype), dtype
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert not cpu.supports(dtype), dtype


def test_a_type_is_tried_once(cpu, monkeypatch):
    tried = []
    monkeypatch.setattr("mizzen.accelerator.cpu.computes", lambda device, dtype: not tried.append(dtype))
    assert [cpu.supports(torch.float16) for _ in range(3)] == [True] * 3
    assert tried == [torch.float16]


def test_the_generator_can_be_seeded_saved_and_set(cpu):
    untouched = torch.get_rng_state()
    try:
        cpu.seed(11)
        first = torch.rand(4)
        state = cpu.rng_state()
        second = torch.rand(4)
        cpu.set_rng_state(state)
        assert torch.equal(torch.rand(4), second)
        cpu.seed(11)
        assert torch.equal(torch.rand(4), first)
    finally:
        torch.set_rng_state(untouched)


def test_pinning_gives_the_tensor_itself(cpu):
    tensor = torch.ones(3)
    assert cpu.pin_memory(tensor) is tensor


def test_code_that_overlaps_runs_unchanged(cpu):
    side, main = cpu.stream(priority=-1), cpu.current_stream()
    side.wait_stream(main)
    with side:
        tensor = torch.ones(4) * 2
        done = side.record_event()
    main.wait_event(done)
    hold(tensor, side)
    side.synchronize()
    assert side.query() and done.query() and tensor.sum() == 8


def test_events_measure_in_milliseconds(cpu, monkeypatch):
    times = iter([1_000_000, 4_500_000])
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(times))
    begin, end = cpu.event(timing=True), cpu.event(timing=True)
    begin.record()
    with pytest.raises(UsageError, match="never recorded"):
        begin.elapsed_time(end)
    end.record()
    end.synchronize()
    end.wait()
    assert begin.elapsed_time(end) == 3.5


def test_it_says_what_it_is(cpu):
    info = cpu.describe()
    assert info.name and info.architecture == torch.backends.cpu.get_cpu_capability()
