"""A device module like `torch.cuda`, on the host, that writes down its calls; and a fresh start for each test."""

import pytest
import torch

from mizzen.ambient import AMBIENT


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No accelerator is chosen and none is registered, neither before nor after a test."""
    monkeypatch.setattr(AMBIENT, "accelerator", None)
    monkeypatch.setattr(AMBIENT, "accelerator_factories", {})
    monkeypatch.setattr(AMBIENT, "warned", set())
    for name in ("MIZZEN_ACCELERATOR", "DS_ACCELERATOR", "LOCAL_SIZE", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


class FakeStream:
    def __init__(self, priority=0):
        self.priority = priority


class FakeEvent:
    """Done only after `synchronize`; marks are one millisecond apart."""

    clock = 0

    def __init__(self, enable_timing=False):
        self.timing, self.mark, self.done = enable_timing, None, False

    def record(self):
        FakeEvent.clock += 1
        self.mark, self.done = FakeEvent.clock, False

    def query(self):
        return self.done

    def synchronize(self):
        self.done = True

    def elapsed_time(self, end):
        if not (self.done and end.done):
            raise RuntimeError("device not ready")
        return float(end.mark - self.mark)


class FakeModule:
    Stream, Event = FakeStream, FakeEvent

    def __init__(self, count=2, stats=None):
        self.count, self.current, self.calls, self.stats = count, 0, [], stats or {}

    def device_count(self):
        return self.count

    def current_device(self):
        return self.current

    def set_device(self, index):
        self.current = index

    def memory_stats(self, index):
        self.calls.append(("memory_stats", index))
        return self.stats

    def mem_get_info(self, index):
        self.calls.append(("mem_get_info", index))
        return 3, 10

    def get_device_name(self, index):
        return f"fake {index}"

    def current_stream(self):
        return FakeStream()

    def get_rng_state(self, device):
        self.calls.append(("get_rng_state", device))
        return torch.tensor([7], dtype=torch.uint8)

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))

        return call


@pytest.fixture
def install(monkeypatch):
    """`install("npu", count=2)` lets torch know a fake module under a name, and gives it."""
    real = torch.get_device_module

    def put(name, **options):
        module = FakeModule(**options)
        monkeypatch.setattr(torch, "get_device_module", lambda each=None: module if each == name else real(each))
        return module

    return put
