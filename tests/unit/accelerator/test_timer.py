import pytest

from mizzen.accelerator import Timer
from mizzen.accelerator.cpu import Cpu
from mizzen.accelerator.device import TorchDevice
from mizzen.errors import UsageError


@pytest.fixture
def timer(install):
    """On a fake device whose marks are a millisecond apart and which is done only when somebody waits."""
    install("cuda")
    return Timer(TorchDevice("cuda", "nccl"))


def test_laps_add_up_and_a_read_starts_again(timer):
    for _ in range(3):
        with timer:
            pass
    assert timer.read() == pytest.approx(0.003)
    assert timer.read() == 0.0


def test_nothing_waits_until_the_read(timer):
    with timer:
        pass
    assert not timer.ready()
    assert timer.read() == pytest.approx(0.001)
    assert timer.ready()


def test_an_open_lap_counts_towards_the_next_read(timer):
    timer.start()
    assert timer.read() == 0.0
    timer.stop()
    assert timer.read() == pytest.approx(0.001)


def test_laps_that_are_done_are_added_up_without_a_read(monkeypatch):
    times = iter(range(0, 10**12, 10**9))
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(times))
    timer = Timer(Cpu())
    for _ in range(50):
        with timer:
            pass
    assert not timer._laps
    assert timer.read() == pytest.approx(50.0)


def test_a_lap_ends_when_its_body_raises(timer):
    with pytest.raises(ValueError, match="mine"), timer:
        raise ValueError("mine")
    assert timer.read() == pytest.approx(0.001)


def test_wrong_order_is_said(timer):
    with pytest.raises(UsageError, match="without start"):
        timer.stop()
    timer.start()
    with pytest.raises(UsageError, match="twice"):
        timer.start()


def test_a_split_never_waits_and_starts_the_timer_again(timer):
    timer.start()
    timer.stop()
    laps = list(timer._laps)
    split = timer.split()
    with timer:
        pass
    assert split.seconds() is None
    for event in laps[0]:
        event.synchronize()
    assert split.seconds() == pytest.approx(0.001)
    assert timer.read() == pytest.approx(0.001)
