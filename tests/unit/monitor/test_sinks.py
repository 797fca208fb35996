import csv
import json
import subprocess
import sys
from datetime import datetime

import numpy
import pytest
import torch

from mizzen.config.observe import CsvConfig, JsonlConfig, TensorboardConfig
from mizzen.errors import UsageError
from mizzen.monitor.sinks import MOST_OPEN, CsvSink, JsonlSink, RunMonitor, TensorboardSink, events_of, monitor_of


class Kept:
    """A sink in memory; `fails` names the call that raises."""

    def __init__(self, fails=""):
        self.fails, self.calls, self.events = fails, [], []

    def note(self, call):
        self.calls.append(call)
        if call == self.fails:
            raise OSError(28, "No space left on device")

    def write(self, events, report=None):
        self.note("write")
        self.events.append((list(events), report))

    def flush(self):
        self.note("flush")

    def close(self):
        self.note("close")


def test_each_step_goes_to_every_sink_with_its_report(step):
    sinks = {"a": Kept(), "b": Kept()}
    monitor = RunMonitor(sinks, enabled=True)
    monitor.on_step(step(1))
    monitor.on_step(second := step(2))
    assert sinks["a"].events == sinks["b"].events
    (first_events, _), (second_events, report) = sinks["a"].events
    assert report is second
    assert ("Train/Samples/train_loss", 2.5, 16) in second_events
    rates = ["Train/Samples/samples_per_sec" in [name for name, *_ in each] for each in (first_events, second_events)]
    assert rates == [False, True], "the first step's time includes the start of the run"


def test_loss_scale_and_rate_are_written_when_they_mean_something(step):
    sink = Kept()
    monitor = RunMonitor({"a": sink}, enabled=True, has_loss_scale=True, has_rate=False)
    monitor.on_step(step(1, loss_scale=2.0))
    monitor.on_step(step(2, loss_scale=2.0))
    names = [name.split("/")[-1] for name, *_ in sink.events[-1][0]]
    assert names == ["train_loss", "lr", "grad_norm", "loss_scale"]


def test_events_of_a_user_become_plain_numbers():
    sink = Kept()
    monitor = RunMonitor({"a": sink}, enabled=True)
    monitor.write_events([("x", torch.tensor([0.5]), 8), ("y", numpy.float32(0.25), numpy.int64(8)), ("z", 3, 8)])
    assert sink.events == [([("x", 0.5, 8), ("y", 0.25, 8), ("z", 3, 8)], None)]
    assert {type(part) for event in sink.events[0][0] for part in event} == {str, float, int}


@pytest.mark.parametrize("event", [("x", 1.0), ("x", torch.ones(2), 8), ("x", "much", 8), ("x", 1.0, 0.5), 7])
def test_an_event_of_another_shape_is_refused(event):
    with pytest.raises(UsageError, match=r"an event is \(name, number, global samples\), not"):
        RunMonitor({"a": Kept()}, enabled=True).write_events([event])


def test_a_sink_that_fails_is_given_up_and_named_while_the_others_go_on(step, warned):
    broken, sound = Kept(fails="write"), Kept()
    monitor = RunMonitor({"csv_monitor": broken, "wandb": sound}, enabled=True)
    for number in range(1, 4):
        monitor.on_step(step(number))
    monitor.write_events([("x", 1.0, 24)])
    monitor.flush()
    monitor.close()
    assert broken.calls == ["write"]
    assert sound.calls == ["write"] * 4 + ["flush", "close"]
    [text] = warned
    assert text.startswith("csv_monitor: OSError: ") and "No space left on device" in text
    assert text.endswith("nothing more is written there, and training goes on")


@pytest.mark.parametrize("call", ["flush", "close"])
def test_flush_and_close_may_fail_too(call, warned):
    broken, sound = Kept(fails=call), Kept()
    monitor = RunMonitor({"broken": broken, "sound": sound}, enabled=True)
    monitor.flush()
    monitor.close()
    assert sound.calls == ["flush", "close"] and len(warned) == 1


def test_an_error_of_the_device_is_not_taken_for_one_of_a_sink(step):
    def lost():
        raise RuntimeError("device-side assert")

    sink = Kept()
    with pytest.raises(RuntimeError, match="device-side assert"):
        RunMonitor({"a": sink}, enabled=True).on_step(step(1, loss=lost))
    assert sink.calls == []


def test_an_interrupt_passes(step):
    class Interrupted(Kept):
        def write(self, events, report=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RunMonitor({"a": Interrupted()}, enabled=True).on_step(step(1))


def test_without_sinks_nothing_is_read_or_checked(step):
    mute = RunMonitor({}, enabled=True)
    mute.on_step(step(1, loss=lambda: pytest.fail("read")))
    mute.write_events(pytest.fail(event) for event in ["consumed"])
    mute.flush()
    mute.close()
    assert mute.enabled


def test_a_closed_monitor_writes_nothing(step):
    monitor = RunMonitor({"a": (sink := Kept())}, enabled=True)
    monitor.close()
    monitor.on_step(step(1))
    monitor.close()
    assert sink.calls == ["close"]


def test_the_monitor_among_the_observers(step):
    monitor = RunMonitor({"a": Kept()}, enabled=True)
    assert monitor_of((object(), monitor)) is monitor
    absent = monitor_of(())
    absent.write_events([("x", 1.0, 1)])
    assert not absent.enabled


def test_the_names_and_the_position_are_the_known_ones(step):
    report = step(3, loss_scale=1024.0, phases={"forward": 0.25, "backward": 0.5})
    assert events_of(report, has_loss_scale=True, has_rate=True) == [
        ("Train/Samples/train_loss", 2.5, 24),
        ("Train/Samples/lr", 1e-3, 24),
        ("Train/Samples/grad_norm", 1.5, 24),
        ("Train/Samples/loss_scale", 1024.0, 24),
        ("Train/Samples/samples_per_sec", 16.0, 24),
        ("Train/Samples/elapsed_time_ms_forward", 250.0, 24),
        ("Train/Samples/elapsed_time_ms_backward", 500.0, 24),
    ]


def test_what_is_not_there_is_left_out(step):
    report = step(1, loss=None, norm=None, lr=(), seconds=0.0)
    assert events_of(report, has_loss_scale=False, has_rate=True) == []
    assert events_of(step(1, lr=()), has_loss_scale=False, has_rate=False) == [
        ("Train/Samples/train_loss", 2.5, 8),
        ("Train/Samples/grad_norm", 1.5, 8),
    ]


def test_measures_are_events_under_their_names(step):
    report = step(1, lr=(), norm=None, measures={"mfu": 0.4, "samples_per_sec": 16.0})
    assert events_of(report, has_loss_scale=False, has_rate=True) == [
        ("Train/Samples/train_loss", 2.5, 8),
        ("Train/Samples/samples_per_sec", 16.0, 8),
        ("Train/Samples/mfu", 0.4, 8),
    ]


@pytest.fixture
def csv_sink(tmp_path):
    return lambda: CsvSink(CsvConfig(output_path=str(tmp_path), job_name="job"))


def test_a_file_for_each_number_with_its_last_name_as_the_header(csv_sink, tmp_path):
    first = csv_sink()
    first.write([("Train/Samples/lr", 0.5, 8), ("Train/Samples/train_loss", 2.5, 8)])
    first.write([("Train/Samples/lr", 0.25, 16), ("plain name", float("nan"), 16)])
    assert {path.name: path.read_text() for path in (tmp_path / "job").iterdir()} == {
        "Train_Samples_lr.csv": "step,lr\n8,0.5\n16,0.25\n",
        "Train_Samples_train_loss.csv": "step,train_loss\n8,2.5\n",
        "plain_name.csv": "step,plain name\n16,nan\n",
    }


def test_a_resumed_run_appends_without_a_second_header(csv_sink, tmp_path):
    for samples in (8, 16):
        run = csv_sink()
        run.write([("lr", 0.5, samples)])
        run.flush()
        run.close()
    assert (tmp_path / "job" / "lr.csv").read_text() == "step,lr\n8,0.5\n16,0.5\n"


def test_numbers_for_very_many_names_do_not_use_up_the_files_of_the_process(csv_sink, tmp_path):
    many = csv_sink()
    for samples in (8, 16):
        many.write([(f"norm/{layer}", 1.0, samples) for layer in range(2 * MOST_OPEN)])
    assert len(many._files) == MOST_OPEN
    assert all(path.read_text().endswith("\n8,1.0\n16,1.0\n") for path in (tmp_path / "job").iterdir())
    assert len(list((tmp_path / "job").iterdir())) == 2 * MOST_OPEN
    many.close()
    assert many._files == {}


def test_a_name_with_a_comma_is_one_column(csv_sink, tmp_path):
    csv_sink().write([('a "b", c', 1.0, 8)])
    [path] = (tmp_path / "job").iterdir()
    with path.open(newline="") as file:
        assert list(csv.reader(file)) == [["step", 'a "b", c'], ["8", "1.0"]]


def test_without_a_path_the_files_are_in_csv_logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sink = CsvSink(CsvConfig())
    monkeypatch.chdir("/")
    sink.write([("lr", 1.0, 8)])
    assert (tmp_path / "csv_logs" / "DeepSpeedJobName" / "lr.csv").exists()


@pytest.fixture
def jsonl_sink(tmp_path, memory):
    return lambda: JsonlSink(JsonlConfig(output_path=str(tmp_path), job_name="run"), memory)


def lines(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (tmp_path / "run.jsonl").read_text().splitlines()]


def test_a_step_is_one_line_with_everything(jsonl_sink, step, tmp_path):
    report = step(3, tokens=4096, skipped_steps=1, phases={"forward": 0.25}, measures={"mfu": 0.4})
    jsonl_sink().write(events_of(report, has_loss_scale=False, has_rate=True), report)
    [line] = lines(tmp_path)
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert line == {
        "step": 3,
        "applied": True,
        "reason": "",
        "loss": 2.5,
        "grad_norm": 1.5,
        "lr": [1e-3],
        "loss_scale": 1.0,
        "samples": 8,
        "global_samples": 24,
        "tokens": 4096,
        "seconds": 0.5,
        "skipped_steps": 1,
        "phases": {"forward": 0.25},
        "measures": {"mfu": 0.4},
        "memory": {"allocated": 2 * 2**30, "reserved": 3 * 2**30, "peak": None},
    }


def test_a_skipped_step_says_why_in_valid_json(jsonl_sink, step, tmp_path):
    report = step(3, loss=float("inf"), norm=float("nan"), reason="step 4: gradient not finite on rank 1: w")
    jsonl_sink().write([], report)
    [line] = lines(tmp_path)
    assert (line["applied"], line["reason"]) == (False, "step 4: gradient not finite on rank 1: w")
    assert (line["loss"], line["grad_norm"]) == ("inf", "nan")


def test_events_of_a_user_get_lines_of_their_own_and_a_resumed_run_appends(jsonl_sink, step, tmp_path):
    first = jsonl_sink()
    first.write([], step(1))
    first.close()
    second = jsonl_sink()
    second.write([("Eval/loss", 1.25, 8), ("Eval/accuracy", 0.5, 8)])
    second.flush()
    assert [line.get("event", line.get("step")) for line in lines(tmp_path)] == [1, "Eval/loss", "Eval/accuracy"]
    assert {key: lines(tmp_path)[1][key] for key in ("value", "global_samples")} == {"value": 1.25, "global_samples": 8}


KILLED = """
import os, signal, sys
from mizzen.accelerator import Memory
from mizzen.config.observe import JsonlConfig
from mizzen.monitor.sinks import JsonlSink
from mizzen.monitor.report import StepReport
sink = JsonlSink(JsonlConfig(output_path=sys.argv[1], job_name="run"), lambda: Memory(1, 1, 1))
for number in range(1, 51):
    sink.write([], StepReport(step=number, applied=True))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_keeps_every_line(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env={"PYTHONPATH": ":".join(sys.path)})
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 51))


reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def scalars(folder):
    """name -> [(samples, value)], as TensorBoard itself reads the folder."""
    found = reading.EventAccumulator(str(folder))
    found.Reload()
    return {name: [(point.step, point.value) for point in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_tensorboard_reads_what_was_written(tmp_path):
    for samples in (8, 16):  # the second is a resumed run
        sink = TensorboardSink(TensorboardConfig(output_path=str(tmp_path), job_name="job"))
        sink.write([("Train/Samples/lr", 0.5, samples)])
        sink.flush()
        assert scalars(tmp_path / "job")["Train/Samples/lr"][-1] == (samples, 0.5)
        sink.write([("Eval/loss", 0.25, samples)])
        sink.close()
    assert scalars(tmp_path / "job") == {
        "Train/Samples/lr": [(8, 0.5), (16, 0.5)],
        "Eval/loss": [(8, 0.25), (16, 0.25)],
    }


ENDS = """
import sys, time
from tensorboard.summary.writer.record_writer import RecordWriter
from mizzen.config.observe import TensorboardConfig
from mizzen.monitor.sinks import TensorboardSink
write = RecordWriter.write
RecordWriter.write = lambda self, data: time.sleep(0.1) or write(self, data)  # a slow disk: the queue fills
sink = TensorboardSink(TensorboardConfig(output_path=sys.argv[1]))
for samples in range(10):
    sink.write([("lr", 1.0, samples)])
"""


def test_a_program_that_just_ends_loses_nothing(tmp_path):
    subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], env={"PYTHONPATH": ":".join(sys.path)}, check=True)
    assert len(scalars(tmp_path / "DeepSpeedJobName")["lr"]) == 10
