"""What docs/monitoring.md shows is what happens."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from mizzen.accelerator import Memory
from mizzen.config.load import load
from mizzen.environment import World
from mizzen.monitor.build import build_observers
from mizzen.monitor.sinks import monitor_of
from mizzen.monitor.terminal import Printer, PrintOptions, Screen

PAGE = (Path(__file__).parents[3] / "docs" / "monitoring.md").read_text()
GIB = 2**30


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def finished(tmp_path, monkeypatch, step, capsys):
    """A run with the configuration on the page."""
    monkeypatch.chdir(tmp_path)
    observers = build_observers(load(json.loads(blocks("json")[0])), World())
    engine = SimpleNamespace(monitor=monitor_of(observers), global_samples=24)
    for number in (1, 2, 2, 3):  # 2 is repeated, as after a resume
        for observer in observers:
            observer.on_step(step(number, loss=1 / number))
    exec(compile(blocks("python")[1], "docs/monitoring.md", "exec"), {"engine": engine})
    yield engine
    for observer in observers:
        observer.close()


def test_the_configuration_writes_what_the_page_says(finished):
    assert Path("logs/run.jsonl").read_text().count("\n") == 5
    assert Path("logs/csv/run/Eval_accuracy.csv").read_text() == "step,accuracy\n24,0.75\n"


def test_the_lines_are_read_as_the_page_reads_them(finished):
    names = {}
    exec(compile(blocks("python")[0], "docs/monitoring.md", "exec"), names)
    assert names["losses"] == [1, 1 / 2, 1 / 3]
    shown = subprocess.run(["bash", "-c", blocks("bash")[0]], capture_output=True, text=True, check=True)
    assert len(shown.stdout.splitlines()) == 3


def test_the_line_of_json_on_the_page_has_the_keys_of_a_real_one(finished):
    [shown] = map(json.loads, blocks("json")[1].splitlines())
    written = json.loads(Path("logs/run.jsonl").read_text().splitlines()[0])
    assert [*shown] == [*written] and [*shown["memory"]] == [*written["memory"]]


def test_the_printed_lines_on_the_page_are_printed(capsys, step):
    memory = Memory(allocated=int(31.07 * GIB), reserved=int(40.25 * GIB), peak=int(38.91 * GIB))
    lines = Printer(Screen(), lambda: memory, PrintOptions(every=20, phases=True, memory=True))
    report = {"lr": (3e-4,), "momentum": ((0.9, 0.95),), "samples": 64, "tokens": 131072, "seconds": 64 / 118.4}
    lines.on_step(step(1, **report, phases={}))  # the device was not through with it
    phases = {"forward": 0.4121, "backward": 0.87154, "step": 0.06602}
    lines.on_step(step(20, loss=4.1875, norm=0.9132, skipped_steps=1, phases=phases, **report))
    assert capsys.readouterr().err == blocks("text")[0]


def test_every_section_and_key_of_printing_is_on_the_page():
    for key in ("jsonl_monitor", "csv_monitor", "tensorboard", "wandb", "comet", "progress.interval"):
        assert f"`{key}" in PAGE
    for extra in ("tensorboard", "wandb", "comet"):
        assert f"pip install 'mizzen[{extra}]'" in PAGE
