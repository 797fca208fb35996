from mizzen.monitor.report import ACCUMULATING, StepReport


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
