"""What each rank of a real run leaves beside its events, and what `mizzen watch` makes of it."""

import json
import time
from pathlib import Path

import mizzen
from mizzen.watch.run import find_runs
from mizzen.watch.watcher import Watcher
from parity.programs import Case, build, micro_batches


def train(folder: str, beside: bool) -> None:
    section = {"enabled": True, "output_path": folder, "job_name": "run", "heartbeat": 0.05}
    engine, *_ = mizzen.initialize(model=build(Case()), config=Case(2, 2).config | {"jsonl_monitor": section})
    for step in range(4):
        engine.backward(engine(micro_batches(Case(2, 2), step, engine.global_rank)[0]))
        engine.step()
    engine.save_checkpoint(f"{folder}/checkpoints", async_save=beside)
    engine.load_checkpoint(f"{folder}/checkpoints")
    time.sleep(0.1)
    engine.destroy()


def test_starts_beats_saves_loads_and_ends(world, tmp_path):
    world(2).run(train, str(tmp_path), True)
    first, second = (
        [json.loads(line) for line in (tmp_path / "run.ranks" / f"rank-{rank}.jsonl").read_text().splitlines()]
        for rank in (0, 1)
    )
    told = [line["kind"] for line in first if line["kind"] != "beat"]
    assert told == ["start", "save", "load", "end"]
    assert [line["kind"] for line in second if line["kind"] != "beat"] == ["start", "load", "end"]
    assert any(line["kind"] == "beat" and line["memory"]["allocated"] > 0 for line in second)
    assert "ZeRO stage 2 over dp=2" in first[0]["plan"]["text"] and first[0]["plan"]["layout"]["dp"] == 2
    assert "plan" not in second[0]


def test_the_watcher_reads_it(world, tmp_path):
    world(2).run(train, str(tmp_path), False)
    watcher = Watcher(find_runs([str(tmp_path)]))
    watcher.read_all()
    [run] = watcher.since(0)["runs"]
    steps = [json.loads(line) for line in Path(tmp_path / "run.jsonl").read_text().splitlines()]
    assert run["state"] == "finished" and run["words"] == "all 2 ranks ended well"
    assert run["series"]["loss"]["last"] == [step["loss"] for step in steps]
    assert [rank["step"] for rank in run["ranks"]] == [4, 4] and set(run["memory"]) == {"0", "1"}
    assert [(mark["kind"], mark["step"], mark["text"]) for mark in run["marks"]] == [
        ("start", 0, "2 ranks"),
        ("save", 4, "global_step4"),
        ("load", 4, "went on after step 4"),
    ]
    assert run["passed_over"] == 0
