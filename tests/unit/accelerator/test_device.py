"""The part of an accelerator that torch's modules share, against a module that is not a GPU's."""

import pytest
import torch

from mizzen.accelerator.device import TorchDevice, backend_for, computes, xpu
from mizzen.accelerator.mps import Mps
from mizzen.accelerator.streams import hold
from mizzen.errors import DeviceError

STATS = {
    "allocated_bytes.all.current": 100,
    "allocated_bytes.all.peak": 300,
    "reserved_bytes.all.current": 500,
    "reserved_bytes.all.peak": 700,
}


@pytest.fixture
def device():
    return TorchDevice("cuda", comm_backend="nccl", visible_devices="CUDA_VISIBLE_DEVICES")


def test_a_type_that_torch_does_not_know_asks_for_the_vendors_extension():
    assert "knows no such device type: install" in TorchDevice("npu", "hccl").unavailable()


def test_no_device_names_the_variable_that_may_hide_it(device, install, monkeypatch):
    module = install("cuda", count=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "sees no cuda device with CUDA_VISIBLE_DEVICES=''" in device.unavailable()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "CUDA_VISIBLE_DEVICES" not in device.unavailable()
    module.count = 1
    assert device.unavailable() is None


def test_the_current_device_is_the_default(device, install):
    module = install("cuda", count=4)
    device.set_device(2)
    assert (device.current_device(), device.device(), device.device(1)) == (
        2,
        torch.device("cuda", 2),
        torch.device("cuda", 1),
    )
    assert module.current == 2


@pytest.mark.parametrize("index", [2, -1])
def test_a_device_that_is_not_visible_is_refused_with_the_numbers(device, install, monkeypatch, index):
    module = install("cuda", count=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f1c,GPU-77aa")
    with pytest.raises(DeviceError, match=f"device {index} of cuda .* sees 2 with CUDA_VISIBLE_DEVICES='GPU-8f1c"):
        device.set_device(index)
    assert module.current == 0


def test_memory_is_read_from_the_allocators_counters_at_once(device, install):
    module = install("cuda", stats=STATS)
    found = device.memory(1)
    assert (found.allocated, found.reserved, found.peak) == (100, 500, 300)
    assert module.calls == [("memory_stats", 1)]


def test_memory_is_zero_before_the_first_use(device, install):
    install("cuda")
    found = device.memory()
    assert (found.allocated, found.reserved, found.peak) == (0, 0, 0)


def test_the_driver_gives_free_before_total(device, install):
    install("cuda")
    found = device.capacity()
    assert (found.total, found.available) == (10, 3)


def test_a_process_that_may_have_a_share_has_no_more_than_that(device, install):
    module = install("cuda", stats=STATS)
    module.get_per_process_memory_fraction = lambda index: 1.0
    assert device.capacity().total == 10
    module.mem_get_info = lambda index: (3000, 4000)
    module.get_per_process_memory_fraction = lambda index: 0.25
    found = device.capacity()
    assert (found.total, found.available) == (1000, 500)  # of which the allocator has 500


def test_calls_reach_the_module(device, install):
    module = install("cuda")
    device.synchronize()
    device.reset_peak(1)
    device.empty_cache()
    device.seed(5)
    state = device.rng_state(1)
    device.set_rng_state(state)
    assert module.calls == [
        ("synchronize", None),
        ("reset_peak_memory_stats", 1),
        ("empty_cache",),
        ("manual_seed", 5),
        ("get_rng_state", torch.device("cuda", 1)),
        ("set_rng_state", state, torch.device("cuda", 0)),
    ]


def test_streams_and_events_are_torchs(device, install):
    module = install("cuda")
    assert device.stream(priority=-1).priority == -1
    assert isinstance(device.current_stream(), module.Stream)
    assert device.event(timing=True).timing and not device.event().timing
    assert device.describe(1).name == "fake 1"


def test_a_tensor_is_held_for_a_real_stream(device, install):
    class Tensor:
        def record_stream(self, stream):
            self.stream = stream

    install("cuda")
    tensor, stream = Tensor(), device.stream()
    hold(tensor, stream)
    assert tensor.stream is stream


def test_a_type_is_tried_once_on_the_current_device(device, install, monkeypatch):
    tried = []
    install("cuda")
    monkeypatch.setattr("mizzen.accelerator.device.computes", lambda *asked: bool(tried.append(asked)))
    assert [device.supports(torch.float64) for _ in range(2)] == [False, False]
    assert tried == [(torch.device("cuda", 0), torch.float64)]


@pytest.mark.parametrize(
    "error", [TypeError("no float64 here"), NotImplementedError("mul"), RuntimeError("aspect fp64")]
)
def test_what_raises_is_not_supported(monkeypatch, error):
    def ones(*_, **__):
        raise error

    monkeypatch.setattr(torch, "ones", ones)
    assert computes(torch.device("cpu"), torch.float64) is False


def test_a_full_device_says_nothing_about_a_type(monkeypatch):
    def ones(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(torch.OutOfMemoryError):
        computes(torch.device("cpu"), torch.float32)


def test_deterministic_algorithms_do_not_change_the_answer():
    torch.use_deterministic_algorithms(True)
    try:
        assert computes(torch.device("cpu"), torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_backend_is_the_one_that_torch_pairs_with_the_type(monkeypatch):
    assert (backend_for("cuda"), backend_for("xpu"), backend_for("mps")) == ("nccl", "xccl", "gloo")
    assert backend_for("vulkan") == "gloo"
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert backend_for("xpu") == "gloo"


def test_xpu_is_a_row_of_facts():
    found = xpu()
    assert (found.name, found.comm_backend, found.visible_devices) == ("xpu", "xccl", "ZE_AFFINITY_MASK")
    assert found.has_streams and found.is_asynchronous and not found.shares_host_memory


def test_mps_has_one_device_one_queue_and_the_hosts_memory(install, monkeypatch):
    module = install("mps", count=1)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 5)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 8)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 20)
    mps = Mps()
    assert mps.unavailable() is None
    assert mps.device() == torch.device("mps", 0)
    mps.set_device(0)
    with pytest.raises(DeviceError, match="there is one"):
        mps.set_device(1)
    memory, capacity = mps.memory(), mps.capacity()
    assert (memory.allocated, memory.reserved, memory.peak) == (5, 8, None)
    assert (capacity.total, capacity.available) == (20, 12)
    tensor = torch.ones(2)
    assert mps.pin_memory(tensor) is tensor
    with mps.stream() as stream:
        event = stream.record_event()
    assert isinstance(event, module.Event) and event.mark is not None
    hold(tensor, stream)
    assert mps.shares_host_memory and mps.is_asynchronous and not mps.has_streams
