import json

import pytest

from mizzen.errors import UsageError
from mizzen.watch.run import MOST_MARKS, MOST_NAMES, find_runs


def test_every_number_of_a_step_by_its_name(written):
    measures = {"mfu": 0.41, "comm_exposed_ms_dp": 1.5}
    written.step(1, lr=[0.1, 0.2], phases={"forward": 0.25}, tokens=64, seconds=2.0, measures=measures)
    written.step(2, lr=[0.1, 0.2], tokens=64, seconds=2.0, loss="nan", memory={"peak": None, "allocated": 7})
    told = written.told()
    assert told["latest"] == {
        "loss": "nan", "samples": 4, "lr": 0.1, "phases.forward": 0.25, "tokens": 64, "seconds": 2, "mfu": 0.41,
        "comm_exposed_ms_dp": 1.5, "memory.allocated": 7, "tokens_per_sec": 32,
    }  # fmt: skip
    assert told["series"]["loss"]["last"] == [1.0, None] and told["series"]["loss"]["step"] == [1, 2]
    assert told["series"]["tokens_per_sec"]["step"] == [2]  # the first step's seconds include the start


def test_numbers_of_a_users_own(written):
    written.step(3)
    written.write(at=4, event="Eval/accuracy", value=0.75, global_samples=12)
    assert written.told()["series"]["Eval/accuracy"]["last"] == [0.75]


def test_only_what_changed_is_told(written):
    written.step(1)
    cursor = written.watcher.since(0)["revision"]
    written.watcher.read_all()
    cursor = written.watcher.since(0)["revision"]
    assert written.told(cursor)["series"] == {}
    written.step(2)
    assert written.told(cursor)["series"]["loss"] | {} == {
        "from": 1, "time": [written.told()["heard"]], "step": [2], "last": [0.5],
    }  # fmt: skip


def test_ranks_marks_and_the_plan(written):
    plan = {"text": "words", "layout": {"dp": 2}, "cost": {"states": 5}}
    written.write("rank-0", kind="start", rank=0, world=2, host="a", heartbeat=10, plan=plan)
    written.write("rank-1", kind="start", rank=1, world=2, host="b", heartbeat=10)
    written.step(1)
    written.step(2, applied=False, reason="step 2: gradient not finite")
    for rank in (0, 1):
        where = {"step": 2, "phase": "step", "unit": "", "waiting": "all_reduce of dp" if rank else ""}
        written.write(f"rank-{rank}", at=3, kind="beat", **where, memory={"allocated": 100 + rank})
    written.write("rank-0", at=4, kind="save", tag="global_step2", step=2, seconds=0.1)
    written.write("rank-0", at=5, kind="start", rank=0, world=2, host="a", heartbeat=10)
    written.write("rank-0", at=6, kind="load", step=2)
    told = written.told()
    assert told["plan"] == plan and told["world"] == 2
    assert [(rank["host"], rank["where"], rank["memory"]) for rank in told["ranks"]] == [
        ("a", "", None),
        ("b", "step waits in all_reduce of dp", 101),
    ]
    assert told["memory"]["1"]["last"] == [101]
    marks = sorted((mark["time"], mark["kind"], mark["step"], mark["text"]) for mark in told["marks"])
    assert [mark[1:] for mark in marks] == [
        ("start", 0, "2 ranks"),
        ("skip", 2, "step 2: gradient not finite"),
        ("save", 2, "global_step2"),
        ("restart", 2, "2 ranks"),
        ("load", 2, "went on after step 2"),
    ]


def start(written, ranks=2, at=0.0):
    for rank in range(ranks):
        written.write(f"rank-{rank}", at=at, kind="start", rank=rank, world=ranks, host="a", heartbeat=10)


def test_a_run_that_goes_on_and_ends(written):
    assert written.state(0)[0] == "empty"
    start(written)
    assert written.state(5) == ("running", "last heard of 5 s ago")
    for rank in (0, 1):
        written.write(f"rank-{rank}", at=6, kind="end", error="", step=1)
    assert written.state(1e6) == ("finished", "all 2 ranks ended well")


def test_a_rank_that_fell_silent(written):
    start(written)
    written.write("rank-0", at=100, kind="beat", step=9)
    assert written.state(101) == ("silent", "rank 1 not heard of for 1.7 min")
    assert [rank["state"] for rank in written.told()["ranks"]] == ["silent", "silent"]  # by today's clock


def test_a_rank_that_failed(written):
    start(written)
    written.write("rank-0", at=3, kind="end", error="CommError: rank 1 has left", step=1)
    assert written.state(4) == ("failed", "rank 0: CommError: rank 1 has left; rank 1 left no word")


def test_the_launcher_knows_best_until_the_next_start(written):
    start(written)
    written.write("rank-0", at=3, kind="end", error="CommError: rank 1 has left", step=1)
    written.write("launcher-a", at=4, kind="ending", code=137, text="rank 1 on a was ended by signal 9")
    assert written.state(5) == ("failed", "rank 1 on a was ended by signal 9")
    start(written, ranks=1, at=6)
    assert written.state(7)[0] == "running"
    assert len(written.told()["ranks"]) == 1  # the world is smaller now


def test_a_job_that_was_asked_to_stop_has_not_failed(written):
    start(written)
    written.write("launcher-a", at=4, kind="ending", code=75, text="saved and stopped")
    assert written.state(5) == ("finished", "saved and stopped")


@pytest.mark.parametrize(
    "line",
    [
        b"not json", b"[]", b"7", b"{}", b'{"time": 7}', b'{"time": "x"}', b"\xff\xfe", b"[" * 5000,
        b'{"time": "2026-03-01T00:00:00+00:00", "step": "nan"}', b'{"time": "2026-03-01T00:00:00+00:00", "step": {}}',
        b"1" * 5000, b'{"a": 1}, {"b": 2}',
    ],
)  # fmt: skip
def test_a_line_that_is_none_of_ours_is_passed_over(written, line):
    written.step(1)
    with written.events.open("ab") as file:
        file.write(line + b"\n")
    written.step(2)
    written.ranks.mkdir()
    (written.ranks / "rank-0.jsonl").write_bytes(line + b"\n")
    told = written.told()
    assert told["series"]["loss"]["last"] == [1.0, 0.5] and told["passed_over"] >= 1
    json.dumps(told, allow_nan=False)


def test_strange_values_do_no_harm(written):
    huge = {
        "world": "inf",
        "heartbeat": "nan",
        "plan": {"text": 7, "layout": {"dp": "nan"}, "cost": [1], "x": float("nan")},
    }
    written.write("rank-0", kind="start", rank=0, host=None, **huge)
    written.write("rank-0", kind="beat", step="inf", phase=[1], memory={"allocated": "inf"})
    written.step(1, loss=10**400, lr=[], grad_norm=True, memory=[None])
    written.write(event=["x"], value={}, global_samples=None)
    json.dumps(written.told(), allow_nan=False)


def test_names_and_marks_are_bounded(written):
    for number in range(1, MOST_NAMES + 50):
        written.write(event=f"layer {number}", value=number, global_samples=0)
        written.step(number, applied=False, reason="x")
    told = written.told()
    assert len(told["series"]) == MOST_NAMES and told["passed_over"] > 0
    assert len(told["marks"]) <= MOST_MARKS


def test_a_large_file_is_read_in_pieces_and_comes_out_small(written):
    times = (f"2026-03-01T{n // 3600:02}:{n // 60 % 60:02}:{n % 60:02}+00:00" for n in range(80_000))
    lines = "".join(f'{{"time": "{time}", "event": "x", "value": {n % 97}}}\n' for n, time in enumerate(times))
    written.events.write_text(lines)
    assert written.watcher.look()  # a part of it: a page is served before all of it is read
    assert 0 < written.watcher.since(0)["runs"][0]["read"] < 0.5
    told = written.told()
    assert told["read"] == 1.0 and told["latest"]["x"] == 79_999 % 97
    assert len(json.dumps(told)) < 120_000
    assert max(told["series"]["x"]["high"]) == 96


def test_which_runs_are_meant(tmp_path):
    for name in ("b", "a", "other/a"):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert [run.name for run in find_runs([str(tmp_path)])] == ["a", "b"]
    assert [run.name for run in find_runs([str(tmp_path / "b")])] == ["b"]
    both = find_runs([str(tmp_path / "a.jsonl"), str(tmp_path / "other"), str(tmp_path / "a")])
    assert [run.name for run in both] == [str(tmp_path / "a"), str(tmp_path / "other/a")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no run is here"):
        find_runs([str(tmp_path / "empty")])
    with pytest.raises(UsageError, match="no such file.*jsonl_monitor"):
        find_runs([str(tmp_path / "absent")])
