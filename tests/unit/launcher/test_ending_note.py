import json

from mizzen.launcher.ending import Move, note_ending
from mizzen.progress import announce_run, announced_run


def test_how_an_attempt_ended_is_noted_beside_its_ranks(tmp_path, monkeypatch):
    attempt = tmp_path / "attempt-0"
    attempt.mkdir()
    note_ending(attempt, "node1", Move(1, "before any rank has said where"))
    monkeypatch.setenv("MIZZEN_PROGRESS", str(attempt))
    announce_run(tmp_path / "run.ranks")
    assert announced_run(attempt) == tmp_path / "run.ranks"
    note_ending(attempt, "node1", Move(0))  # one that needs no words
    note_ending(attempt, "node1", Move(None, "rank 2 fell; restart 1 of 1"))
    note_ending(attempt, "node1", Move(137, "rank 2 fell"))
    noted = (tmp_path / "run.ranks" / "launcher-node1.jsonl").read_text().splitlines()
    assert [(line["kind"], line["code"], line["text"]) for line in map(json.loads, noted)] == [
        ("ending", None, "rank 2 fell; restart 1 of 1"),
        ("ending", 137, "rank 2 fell"),
    ]


def test_a_note_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch):
    (tmp_path / "run.ranks").write_text("a file")
    monkeypatch.setenv("MIZZEN_PROGRESS", str(tmp_path))
    announce_run(tmp_path / "run.ranks")
    note_ending(tmp_path, "node1", Move(1, "words"))
