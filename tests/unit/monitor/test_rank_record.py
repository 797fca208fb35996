import json
import subprocess
import sys
import threading

import pytest

from mizzen.accelerator import Memory
from mizzen.config.observe import JsonlConfig
from mizzen.environment import World
from mizzen.monitor.rank_record import RankRecord


@pytest.fixture
def record(tmp_path, memory):
    def make(rank=0, heartbeat=0.0, **more):
        section = JsonlConfig(output_path=str(tmp_path), job_name="run.v1", heartbeat=heartbeat)
        return RankRecord(section, World(rank=rank, size=2), memory, **more)

    return make


def lines(tmp_path, rank=0):
    return [json.loads(line) for line in (tmp_path / "run.v1.ranks" / f"rank-{rank}.jsonl").read_text().splitlines()]


def test_a_life_in_lines(record, tmp_path):
    first = record(plan={"text": "words"})
    first.on_load(7)
    first.close()
    first.close()
    first.on_save("global_step8", 8, 0.5)  # beside training, and longer than that
    start, load, end, save = lines(tmp_path)
    assert (start["kind"], start["rank"], start["world"], start["plan"]) == ("start", 0, 2, {"text": "words"})
    assert (load["kind"], load["step"]) == ("load", 7)
    assert (save["kind"], save["tag"], save["step"], save["seconds"]) == ("save", "global_step8", 8, 0.5)
    assert (end["kind"], end["error"]) == ("end", "")


def test_other_ranks_leave_saves_to_rank_0(record, tmp_path):
    other = record(rank=1)
    other.on_save("global_step8", 8, 0.5)
    other.close()
    assert [line["kind"] for line in lines(tmp_path, 1)] == ["start", "end"]
    assert "plan" not in lines(tmp_path, 1)[0]


def test_a_script_may_change_its_folder(tmp_path, memory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = RankRecord(JsonlConfig(output_path="logs", job_name="run.v1", heartbeat=0.0), World(), memory)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    record.close()
    assert [line["kind"] for line in lines(tmp_path / "logs")] == ["start", "end"]
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_a_heart_beats_until_the_end(record, tmp_path):
    before = threading.active_count()
    beating = record(heartbeat=0.01)
    while len(lines(tmp_path)) < 5:
        pass
    beating.close()
    while threading.active_count() > before:
        pass
    _, *beats, end = lines(tmp_path)
    assert {line["kind"] for line in beats} == {"beat"} and end["kind"] == "end"
    assert beats[0]["memory"]["allocated"] > 0


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, memory, caplog):
    (tmp_path / "run.ranks").write_text("a file")
    blocked = RankRecord(JsonlConfig(output_path=str(tmp_path), job_name="run"), World(), memory)
    blocked.on_save("tag", 1, 1.0)
    blocked.close()
    assert "the record of rank 0" in caplog.text and "training goes on" in caplog.text


PROGRAM = """
import os, sys
from mizzen.accelerator import Memory
from mizzen.config.observe import JsonlConfig
from mizzen.environment import World
from mizzen.monitor.rank_record import RankRecord
section = JsonlConfig(output_path=sys.argv[1], job_name="run.v1", heartbeat=5)
record = RankRecord(section, World(), lambda: Memory(1, 1, 1))
if os.fork() == 0:
    sys.exit(0)  # the end of a child is not that of the rank
os.wait()
raise ValueError("boom")
"""


def test_the_error_that_nobody_caught_is_the_last_word(tmp_path):
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, check=False)
    found = lines(tmp_path)
    assert [line["kind"] for line in found if line["kind"] != "beat"] == ["start", "end"]
    assert found[-1]["error"] == "ValueError: boom"


def test_memory_is_what_the_device_says(tmp_path):
    section = JsonlConfig(output_path=str(tmp_path), job_name="run.v1", heartbeat=0)
    RankRecord(section, World(), lambda: Memory(7, 8, None)).close()
    assert lines(tmp_path)[-1]["memory"] == {"allocated": 7, "reserved": 8, "peak": None}
