from mizzen.accelerator import Memory
from mizzen.monitor.report import ACCUMULATING, MemoryUse, PhaseTimes, Rates, StepReport


def test_a_step_is_applied_or_skipped_or_still_accumulating(step):
    applied, skipped, accumulating = step(3), step(3, reason="step 4: not finite"), step(3, reason=ACCUMULATING)
    assert [each.is_boundary for each in (applied, skipped, accumulating)] == [True, True, False]
    assert [each.skipped for each in (applied, skipped, accumulating)] == [False, True, False]


def test_values_on_the_device_are_read_when_asked_for():
    reads = []
    report = StepReport(step=1, applied=True, read_loss=lambda: reads.append("loss") or 2.0)
    repr(report)
    assert reads == []
    assert report.loss == 2.0 and reads == ["loss"]
    assert report.grad_norm is None


def test_it_prints_what_happened(step):
    assert str(step(3)) == "StepReport(step=3, loss=2.5, grad_norm=1.5, applied)"
    assert str(step(3, reason="step 4: inf")).endswith("not applied: step 4: inf)")


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
