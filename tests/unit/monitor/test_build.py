import json
import math
import sys

import pytest

from mizzen.environment import World
from mizzen.errors import MissingExtra
from mizzen.monitor.build import build_observers, total_steps
from mizzen.monitor.sinks import monitor_of

FIRST = World(rank=0, size=4)


def kinds(settings, world=FIRST):
    return [type(observer).__name__ for observer in build_observers(settings, world)]


def run(observers, reports):
    for report in reports:
        for observer in observers:
            observer.on_step(report)
    for observer in observers:
        observer.close()


@pytest.mark.parametrize("keys", [{}, {"progress": {"enabled": True}}, {"steps_per_print": 10}])
def test_a_run_of_a_hundred_steps_on_four_ranks_is_quiet(config, step, capfd, keys):
    counts = []
    for rank in range(4):
        run(build_observers(config(**keys), World(rank=rank, size=4)), [step(number) for number in range(1, 101)])
        out, err = capfd.readouterr()
        assert out == ""
        counts.append(len(err.splitlines()))
    assert counts[0] <= 15 and counts[1:] == [0, 0, 0]
    assert counts[0] >= 5 or not keys


def test_lines_where_standard_error_is_no_terminal(config, capsys):
    assert kinds(config(progress={"enabled": True})) == ["SkippedSteps", "Printer"]


def test_one_line_on_a_terminal_unless_lines_are_asked_for(config, terminal):
    terminal()
    assert kinds(config(progress={"enabled": True})) == ["SkippedSteps", "ProgressLine"]
    assert kinds(config(progress={"enabled": False})) == ["SkippedSteps"]
    assert kinds(config(progress={"enabled": True}, steps_per_print=10)) == ["SkippedSteps", "Printer"]
    both = config(progress={"enabled": True}, wall_clock_breakdown=True)
    assert kinds(both) == ["SkippedSteps", "ProgressLine", "Printer"]


@pytest.mark.parametrize("never", [math.inf, None])
def test_an_infinite_interval_silences_all_progress_but_no_warning(config, terminal, step, warned, never):
    seen = terminal()
    observers = build_observers(config(progress={"enabled": True}, steps_per_print=never), FIRST)
    run(observers, [step(1), step(1, reason="step 2: not finite")])
    assert seen() == "" and len(warned) == 1


def test_breakdowns_have_their_lines_also_without_progress(config, step, capsys):
    settings = config(steps_per_print=math.inf, wall_clock_breakdown=True, memory_breakdown=True)
    run(build_observers(settings, FIRST), [step(number, phases={"forward": 0.001}) for number in range(1, 11)])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("|")[0] for line in lines] == ["mizzen: time (ms) ", "mizzen: memory "] * 2


def test_keys_about_speed_and_scale_reach_lines_and_sinks(config, step, capsys, tmp_path):
    csv = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    quiet = config(steps_per_print=1, timers={"throughput": {"enabled": False}}, csv_monitor=csv)
    run(build_observers(quiet, FIRST), [step(1), step(2)])
    text = capsys.readouterr().err
    assert "per_sec" not in text and "loss_scale" not in text
    assert not (tmp_path / "job" / "Train_Samples_samples_per_sec.csv").exists()
    half = config(steps_per_print=1, fp16={"enabled": True}, csv_monitor=csv)
    run(build_observers(half, FIRST), [step(1), step(2)])
    text = capsys.readouterr().err
    assert "samples_per_sec=16.00" in text and "loss_scale=1" in text
    assert (tmp_path / "job" / "Train_Samples_loss_scale.csv").read_text() == "step,loss_scale\n8,1.0\n16,1.0\n"


def test_other_ranks_write_only_their_own_record_but_agree_on_whether_there_is_a_monitor(config, tmp_path, step):
    settings = config(jsonl_monitor={"enabled": True, "output_path": str(tmp_path)}, steps_per_print=1)
    others = [build_observers(settings, World(rank=rank, size=4)) for rank in range(1, 4)]
    for observers in others:
        run(observers, [step(1)])
        monitor_of(observers).write_events([("x", 1.0, 8)])
    assert [path.name for path in tmp_path.iterdir()] == ["mizzen.ranks"]
    assert sorted(path.name for path in tmp_path.rglob("*.jsonl")) == [f"rank-{rank}.jsonl" for rank in (1, 2, 3)]
    first = build_observers(settings, FIRST)
    assert [monitor_of(each).enabled for each in (first, *others)] == [True] * 4
    run(first, [step(1)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mizzen.jsonl", "mizzen.ranks"]
    assert [monitor_of(build_observers(config(), World(rank=rank))).enabled for rank in (0, 1)] == [False, False]


def test_every_sink_is_served_and_the_memory_is_this_processes(config, tmp_path, step):
    files = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    observers = build_observers(config(jsonl_monitor=files, csv_monitor=files), FIRST)
    monitor_of(observers).write_events([("Eval/loss", 1.0, 0)])
    run(observers, [step(1)])
    event, line = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert event["event"] == "Eval/loss" and line["memory"]["allocated"] > 2**20
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "Eval_loss.csv",
        "Train_Samples_train_loss.csv",
        "Train_Samples_lr.csv",
        "Train_Samples_grad_norm.csv",
    }


def test_a_sink_that_cannot_be_opened_is_named_and_training_goes_on(config, tmp_path, step, warned):
    (tmp_path / "file").write_text("in the way")
    blocked = {"enabled": True, "output_path": str(tmp_path / "file")}
    open_one = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    observers = build_observers(config(csv_monitor=blocked, jsonl_monitor=open_one), FIRST)
    run(observers, [step(1)])
    assert [text.split(":")[0] for text in warned] == ["csv_monitor"]
    assert (tmp_path / "run.jsonl").read_text().count("\n") == 1


def test_a_full_disk_ends_the_file_and_not_the_training(config, tmp_path, step, warned):
    (tmp_path / "run.jsonl").symlink_to("/dev/full")
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    run(build_observers(config(jsonl_monitor=section), FIRST), [step(1), step(2)])
    [text] = warned
    assert text.startswith("jsonl_monitor: OSError") and "No space left on device" in text


def test_an_absent_package_is_an_error_at_the_start(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match="wandb"):
        build_observers(config(wandb={"enabled": True}), FIRST)


@pytest.mark.parametrize(
    ("params", "total"), [({"total_num_steps": 500}, 500), ({"total_num_steps": 5e2}, 500), ({}, None)]
)
def test_the_number_of_steps_comes_from_the_schedule(config, params, total):
    assert total_steps(config(scheduler={"type": "WarmupDecayLR", "params": params})) == total
    assert total_steps(config()) is None


def test_the_line_on_a_terminal_knows_the_number_of_steps(config, terminal, step):
    seen = terminal()
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 500}}
    run(build_observers(config(progress={"enabled": True}, scheduler=schedule), FIRST), [step(1)])
    assert "step 1/500" in seen()
