from mizzen.accelerator import Memory
from mizzen.monitor.measures import MemoryUse, PhaseTimes, Rates


def test_the_first_step_has_no_rate_and_tokens_only_where_they_are_known(step):
    rates = Rates()
    assert rates.read(step(1, seconds=60.0)) == {}
    assert rates.read(step(2, tokens=100)) == {"samples_per_sec": 16.0, "tokens_per_sec": 200.0}
    assert rates.read(step(3)) == {"samples_per_sec": 16.0}
    assert rates.read(step(4, seconds=0.0)) == {}


def test_times_are_those_of_the_phases(step):
    assert PhaseTimes().read(step(1, phases={"forward": 0.25})) == {"elapsed_time_ms_forward": 250.0}
    assert PhaseTimes().read(step(1)) == {}


def test_memory_is_in_bytes_and_the_peak_may_be_unknown(step, memory):
    known = {"memory_allocated": 2 * 2**30, "memory_reserved": 3 * 2**30}
    assert MemoryUse(memory).read(step(1)) == known
    assert MemoryUse(lambda: Memory(1, 2, 3)).read(step(1))["memory_peak"] == 3
