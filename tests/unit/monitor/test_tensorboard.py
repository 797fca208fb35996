import subprocess
import sys

import pytest

from mizzen.config.observe import TensorboardConfig
from mizzen.monitor.tensorboard import TensorboardSink

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
from mizzen.monitor.tensorboard import TensorboardSink
write = RecordWriter.write
RecordWriter.write = lambda self, data: time.sleep(0.1) or write(self, data)  # a slow disk: the queue fills
sink = TensorboardSink(TensorboardConfig(output_path=sys.argv[1]))
for samples in range(10):
    sink.write([("lr", 1.0, samples)])
"""


def test_a_program_that_just_ends_loses_nothing(tmp_path):
    subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], env={"PYTHONPATH": ":".join(sys.path)}, check=True)
    assert len(scalars(tmp_path / "DeepSpeedJobName")["lr"]) == 10
