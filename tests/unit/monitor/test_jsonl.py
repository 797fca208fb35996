import json
import subprocess
import sys
from datetime import datetime

import pytest

from mizzen.config.observe import JsonlConfig
from mizzen.monitor.events import events_of
from mizzen.monitor.jsonl import JsonlSink


@pytest.fixture
def sink(tmp_path, memory):
    return lambda: JsonlSink(JsonlConfig(output_path=str(tmp_path), job_name="run"), memory)


def lines(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (tmp_path / "run.jsonl").read_text().splitlines()]


def test_a_step_is_one_line_with_everything(sink, step, tmp_path):
    report = step(3, tokens=4096, skipped_steps=1, phases={"forward": 0.25}, measures={"mfu": 0.4})
    sink().write(events_of(report, has_loss_scale=False, has_rate=True), report)
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


def test_a_skipped_step_says_why_in_valid_json(sink, step, tmp_path):
    report = step(3, loss=float("inf"), norm=float("nan"), reason="step 4: gradient not finite on rank 1: w")
    sink().write([], report)
    [line] = lines(tmp_path)
    assert (line["applied"], line["reason"]) == (False, "step 4: gradient not finite on rank 1: w")
    assert (line["loss"], line["grad_norm"]) == ("inf", "nan")


def test_events_of_a_user_get_lines_of_their_own_and_a_resumed_run_appends(sink, step, tmp_path):
    first = sink()
    first.write([], step(1))
    first.close()
    second = sink()
    second.write([("Eval/loss", 1.25, 8), ("Eval/accuracy", 0.5, 8)])
    second.flush()
    assert [line.get("event", line.get("step")) for line in lines(tmp_path)] == [1, "Eval/loss", "Eval/accuracy"]
    assert {key: lines(tmp_path)[1][key] for key in ("value", "global_samples")} == {"value": 1.25, "global_samples": 8}


KILLED = """
import os, signal, sys
from mizzen.accelerator import Memory
from mizzen.config.observe import JsonlConfig
from mizzen.monitor.jsonl import JsonlSink
from mizzen.monitor.report import StepReport
sink = JsonlSink(JsonlConfig(output_path=sys.argv[1], job_name="run"), lambda: Memory(1, 1, 1))
for number in range(1, 51):
    sink.write([], StepReport(step=number, applied=True))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_keeps_every_line(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env={"PYTHONPATH": ":".join(sys.path)})
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 51))
