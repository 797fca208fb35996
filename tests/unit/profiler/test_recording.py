"""When a recording starts and ends, whatever the recorder is, and that one which fails ends no training."""

from mizzen.monitor.report import StepReport
from mizzen.profiler.recording import RecordedSteps


class Recorder:
    ending = "txt"

    def __init__(self, error=None):
        self.calls = []
        self.error = error

    def start(self):
        self.calls.append("start")

    def write(self, path):
        self.calls.append("write")
        if self.error:
            raise self.error
        path.write_text("recorded")


def run(span, recorder, steps):
    told = []
    for number in steps:
        span.on_step(StepReport(step=number, applied=True))
        told.append(list(recorder.calls))
        recorder.calls.clear()
    return told


def test_it_starts_after_so_many_steps_and_ends_after_so_many_more(tmp_path):
    recorder = Recorder()
    span = RecordedSteps("profile.trace", recorder, tmp_path / "in" / "rank0.txt", start=2, steps=2)
    assert run(span, recorder, range(1, 7)) == [[], ["start"], [], ["write"], [], []]
    assert (tmp_path / "in" / "rank0.txt").read_text() == "recorded"
    span.close()
    assert recorder.calls == []


def test_a_resumed_run_starts_at_once_and_the_first_step_may_be_recorded(tmp_path):
    recorder = Recorder()
    assert run(RecordedSteps("a", recorder, tmp_path / "a", start=2, steps=1), recorder, [501, 502]) == [
        ["start"],
        ["write"],
    ]
    span = RecordedSteps("b", recorder, tmp_path / "b", start=0, steps=1)
    assert recorder.calls == ["start"]
    recorder.calls.clear()
    assert run(span, recorder, [1, 2]) == [["write"], []]


def test_the_end_of_a_run_writes_what_there_is(tmp_path):
    recorder = Recorder()
    span = RecordedSteps("a", recorder, tmp_path / "a", start=0, steps=9)
    run(span, recorder, [1])
    span.close()
    span.close()
    assert recorder.calls == ["write"]


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path):
    recorder = Recorder(OSError("disk full"))
    span = RecordedSteps("a", recorder, tmp_path / "a", start=0, steps=1)
    assert run(span, recorder, [1, 2]) == [["start", "write"], []]
