"""The record of where a rank is: written by one process, read by another, never seen torn."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mizzen import progress
from mizzen.ambient import AMBIENT
from mizzen.progress import Progress, Record, get_progress, record_path


@pytest.fixture(autouse=True)
def no_process_wide_record(monkeypatch):
    monkeypatch.setattr(AMBIENT, "progress", None)


def test_a_reader_sees_what_was_written(tmp_path):
    path = tmp_path / "rank-0"
    writer = Progress(path, rank=5)
    assert Progress.read(path) == Record(0, os.getpid(), 5, -1, 0, False, 0.0, 0.0, "", "", "", "")

    before = time.monotonic()
    writer.at(step=3, unit="layers.7", phase="backward")
    writer.enter(12, "all_reduce", "group 'dp' of ranks 0, 1")
    seen = Progress.read(path)
    assert seen is not None
    assert (seen.step, seen.unit, seen.phase) == (3, "layers.7", "backward")
    assert (seen.number, seen.collective, seen.group) == (12, "all_reduce", "group 'dp' of ranks 0, 1")
    assert before <= seen.entered <= time.monotonic()
    assert seen == writer.record


def test_what_is_not_given_stays(tmp_path):
    writer = Progress(tmp_path / "rank-0")
    writer.at(step=1, unit="head", phase="forward")
    writer.at(phase="backward")
    assert (writer.record.step, writer.record.unit, writer.record.phase) == (1, "head", "backward")
    writer.at(unit="")
    assert (writer.record.step, writer.record.unit, writer.record.phase) == (1, "", "backward")


def test_every_write_counts(tmp_path):
    writer = Progress(tmp_path / "rank-0")
    counts = []
    for step in range(4):
        writer.at(step=step)
        counts.append(writer.record.writes)
    assert counts == [1, 2, 3, 4]


def test_waiting_ends_also_with_an_error_and_with_the_last_thread():
    writer = Progress()
    with writer.waiting():
        assert writer.record.waiting
        with pytest.raises(KeyError), writer.waiting():
            raise KeyError
        assert writer.record.waiting
    assert not writer.record.waiting


def test_there_is_nothing_to_read_before_the_first_record(tmp_path):
    assert Progress.read(tmp_path / "absent") is None
    (tmp_path / "empty").write_bytes(b"")
    assert Progress.read(tmp_path / "empty") is None
    (tmp_path / "foreign").write_bytes(b"x" * 4096)
    assert Progress.read(tmp_path / "foreign") is None


@pytest.mark.parametrize("cut", [0, 1, 60, 150, 250, 256, 260])
def test_a_writer_killed_in_the_middle_leaves_the_record_before(tmp_path, cut):
    """The newest slot is torn at `cut` bytes, as a kill or another processor would have it: the one before counts."""
    path = tmp_path / "rank-0"
    writer = Progress(path)
    writer.at(step=1, unit="one", phase="forward")
    old = path.read_bytes()
    writer.at(step=2, unit="another unit", phase="backward")
    new = path.read_bytes()
    start = progress._SLOT * (1 + writer.record.writes % 2)
    path.write_bytes(old[:start] + new[start : start + cut] + old[start + cut :])
    seen = Progress.read(path)
    assert seen is not None
    assert (seen.step, seen.unit, seen.phase) == (1, "one", "forward")


def test_long_names_are_cut_and_stay_text():
    writer = Progress()
    writer.at(unit="é" * 200, phase="p" * 100)
    writer.enter(1, "c" * 100, "ü" * 99)
    seen = writer.record
    assert seen.unit == "é" * 32
    assert seen.phase == "p" * 32
    assert seen.collective == "c" * 48
    assert seen.group == "ü" * 32


WRITER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from mizzen.progress import Progress
writer = Progress(Path(sys.argv[1]))
print("ready", flush=True)
step = 0
while not writer.is_asked_to_stop:
    step += 1
    writer.at(step=step, unit=f"unit {step}", phase=f"phase {step}")
print(step)
"""


def test_another_process_never_reads_a_torn_record_and_can_ask_for_the_end(tmp_path):
    path = tmp_path / "rank-0"
    source = str(Path(progress.__file__).parents[1])
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": source}) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        until = time.monotonic() + 0.5
        seen = []
        while time.monotonic() < until:
            seen.append(Progress.read(path))
        Progress.ask_to_stop(path)
        last = int(other.stdout.readline())
    assert None not in seen
    assert {record.pid for record in seen} == {other.pid}
    assert all((r.unit, r.phase) == (f"unit {r.step}", f"phase {r.step}") for r in seen if r.step > 0)
    steps = [record.step for record in seen]
    assert steps == sorted(steps)
    assert len(set(steps)) > 1
    assert other.returncode == 0
    assert Progress.read(path).step == last


def test_a_reader_who_is_overtaken_in_both_slots_looks_again(tmp_path, monkeypatch):
    path = tmp_path / "rank-0"
    writer = Progress(path)
    writer.at(step=1)
    whole = path.read_bytes()
    torn = bytearray(whole)
    for slot in (1, 2):
        torn[slot * len(whole) // 3 + 20] ^= 1
    copies = iter([bytes(torn), bytes(torn), whole])
    monkeypatch.setattr(Path, "read_bytes", lambda _: next(copies))
    seen = Progress.read(path)
    assert seen is not None
    assert seen.step == 1


def test_a_file_that_never_had_a_record_has_none(tmp_path):
    path = tmp_path / "rank-0"
    Progress(path)
    path.write_bytes(path.read_bytes()[:8] + bytes(len(path.read_bytes()) - 8))
    assert Progress.read(path) is None


def test_threads_may_write_at_the_same_time():
    writer = Progress()

    def write(name):
        for step in range(500):
            writer.at(step=step, unit=name)

    threads = [threading.Thread(target=write, args=(f"thread {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.record.writes == 2000
    assert writer.record.step == 499


def test_a_new_attempt_begins_a_new_file(tmp_path):
    path = tmp_path / "rank-0"
    first = Progress(path)
    first.at(step=9)
    Progress.ask_to_stop(path)
    second = Progress(path)
    assert Progress.read(path).step == -1
    assert not second.is_asked_to_stop
    first.at(step=10)  # of a process that is dying
    assert Progress.read(path).step == -1


def test_the_process_has_one_record_in_the_folder_of_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("MIZZEN_PROGRESS", str(tmp_path))
    monkeypatch.setenv("RANK", "6")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "2")
    mine = get_progress()
    assert get_progress() is mine
    mine.at(step=1)
    seen = Progress.read(record_path(tmp_path, 2))
    assert seen is not None
    assert (seen.rank, seen.step) == (6, 1)


def test_threads_that_come_first_together_have_one_record(tmp_path, monkeypatch):
    """The thread that trains and the one that tells the others; a second record would be one that nobody reads."""
    monkeypatch.setenv("MIZZEN_PROGRESS", str(tmp_path))
    monkeypatch.setattr(progress, "_write_stacks_to", lambda _: time.sleep(0.05))
    with ThreadPoolExecutor(4) as pool:
        found = {id(one): one for one in pool.map(lambda _: get_progress(), range(4))}
    assert len(found) == 1
    get_progress().at(step=5)
    assert Progress.read(record_path(tmp_path, 0)).step == 5


def test_without_a_folder_the_record_is_private(monkeypatch):
    monkeypatch.delenv("MIZZEN_PROGRESS", raising=False)
    get_progress().at(step=4)
    assert get_progress().record.step == 4


def test_a_folder_that_cannot_be_written_does_not_stop_the_training(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(AMBIENT, "warned", set())
    monkeypatch.setenv("MIZZEN_PROGRESS", str(tmp_path / "none such"))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("mizzen.log.LOGGER.propagate", True)
    get_progress().at(step=2)
    assert get_progress().record.step == 2
    assert "MIZZEN_PROGRESS" in caplog.text
    assert "none such" in caplog.text


def test_nothing_of_torch_is_loaded():
    code = "import sys, mizzen.progress; sys.exit('torch' in sys.modules)"
    source = str(Path(progress.__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": source}).returncode == 0


def test_a_reader_sees_whether_a_rank_was_asked(tmp_path):
    path = tmp_path / "rank-0"
    assert not Progress.was_asked_to_stop(path)
    writer = Progress(path)
    assert not Progress.was_asked_to_stop(path)
    writer.ask_self_to_stop()
    assert Progress.was_asked_to_stop(path)


def test_a_record_has_its_room_from_the_start():
    """Where memory is full, a file with holes would end the rank with SIGBUS at its first record."""
    path = Path(f"/dev/shm/mizzen-test-{os.getpid()}")
    try:
        progress._fresh_file(path).close()
        assert path.stat().st_blocks > 0
    finally:
        path.unlink(missing_ok=True)
