"""What a supervisor concludes from where ranks are, on its own node and on others, and where their records lie."""

import errno
import tempfile
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from mizzen.errors import LaunchError
from mizzen.launcher import serve
from mizzen.launcher.hosts import Host
from mizzen.launcher.job import Care
from mizzen.launcher.meeting import News, Seat
from mizzen.launcher.supervisor import Supervisor
from mizzen.progress import Record
from unit.launcher.test_job import job

LONG_AGO = -1e9


def record(step, *, waiting, phase="forward", rank=0):
    return Record(1, 1, rank, step, 4, waiting, LONG_AGO, 0.0, "", phase, "all_reduce", "")


@dataclass
class Crew:
    """One rank, which is in the first of these places now, and in the next when it is looked at again."""

    rank: int
    places: list
    ended: list = field(default_factory=list)

    def records(self, *, ended=False):
        if ended:
            return [(None, place) for place in self.ended]
        member = SimpleNamespace(order=SimpleNamespace(rank=self.rank))
        return [(member, self.places.pop(0) if len(self.places) > 1 else self.places[0])]

    def stacks(self):
        return {}


@dataclass
class Board:
    """The store of nodes that look at it at once."""

    nodes: list = field(default_factory=list)
    said: dict = field(default_factory=dict)
    asked: str = ""

    def meeting(self, number):
        return SimpleNamespace(
            request=self.ask,
            news=lambda: News(request=self.asked),
            share=lambda key, text: self.share(number, key, text),
            fail=lambda failure: failure,
        )

    def ask(self, word):
        self.asked = word

    def share(self, number, key, text):
        self.said[key, number] = text
        for supervisor, crew in self.nodes:
            supervisor._hear(crew)
        return [said for (name, _), said in self.said.items() if name == key]


def together(tmp_path, *crews):
    board = Board()
    for number, crew in enumerate(crews):
        made = job(care=Care(hang_timeout=5.0))
        seat = Seat(number, Host(f"w{number}", (0,)), "")
        supervisor = Supervisor(made, seat, board.meeting(number), keeper=None, signals=None, folder=tmp_path, env={})
        board.nodes.append((supervisor, crew))
    return board.nodes


def test_each_look_for_a_hang_is_a_fresh_one(tmp_path):
    """The first was in vain: the ranks had moved on. What was said then is not held against them later."""
    waits = record(3, waiting=True)
    crew = Crew(0, [waits, record(3, waiting=False)])
    (first, _), (_, other) = together(tmp_path, crew, Crew(1, [record(3, waiting=False)]))
    assert first._hung(crew) is None
    crew.places, other.places = [record(8, waiting=True)], [record(9, waiting=False, phase="loading data")]
    ending = first._hung(crew)
    assert ending.failure.rank == 1 and "rank 1 on w1 is not there: step 9, loading data" in ending.failure.cause


def test_a_rank_that_has_ended_is_waited_for(tmp_path):
    crew = Crew(1, [record(8, waiting=True)], [record(7, waiting=False)])
    ((supervisor, _),) = together(tmp_path, crew)
    cause = supervisor._hung(crew).failure.cause
    assert cause.endswith("rank 0 on w0 is not there: step 7, has ended, after all_reduce")


def test_records_lie_elsewhere_where_memory_is_full(monkeypatch, tmp_path):
    kept = []
    make, full = tempfile.mkdtemp, OSError(errno.ENOSPC, "No space left on device")

    def fails_in_memory(*words, dir=None, **more):
        if dir is not None:
            raise full
        return make(*words, dir=dir, **more)

    monkeypatch.setattr(serve, "SHARED", tmp_path / "shm")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", fails_in_memory)
    keeper, seat = SimpleNamespace(remove=kept.append), Seat(0, Host("w", (0,)), "")
    folder = serve.job_folder(job(), seat, keeper)
    assert folder.parent == tmp_path and kept == [folder] and (folder / "pid").exists()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(LaunchError, match="No space left on device; .*No such file.*: free some space, or set"):
        serve.job_folder(job(), seat, keeper)
