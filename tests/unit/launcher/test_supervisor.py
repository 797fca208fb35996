"""What a supervisor concludes from where ranks are, on its own node and on others, and where their records lie."""

import errno
import tempfile
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from mizzen.errors import LaunchError
from mizzen.hang import RankState
from mizzen.launcher import node_main
from mizzen.launcher.hosts import Host
from mizzen.launcher.job import Supervision
from mizzen.launcher.rendezvous import Node, RendezvousStatus
from mizzen.launcher.supervisor import Supervisor
from mizzen.progress import Record
from unit.launcher.test_job import job

LONG_AGO = -1e9


def record(step, *, waiting, phase="forward", rank=0, role=""):
    return Record(1, 1, rank, step, 4, waiting, LONG_AGO, 0.0, "", phase, "all_reduce", "", role=role)


@dataclass
class Workers:
    """One rank, which is in the first of these places now, and in the next when it is looked at again."""

    host: str
    rank: int
    places: list
    ended: list = field(default_factory=list)

    def records(self):
        return []

    def states(self):
        now = self.places.pop(0) if len(self.places) > 1 else self.places[0]
        found = [RankState.of(now, self.host, 0.0)]
        found += [RankState.of(record, self.host, 0.0, has_ended=True) for record in self.ended]
        return found

    def stacks(self):
        return {}


@dataclass
class Board:
    """The store of nodes that look at it at once."""

    nodes: list = field(default_factory=list)
    said: dict = field(default_factory=dict)
    asked: str = ""

    def rendezvous(self, number):
        return SimpleNamespace(
            request=self.ask,
            status=lambda: RendezvousStatus(request=self.asked),
            share=lambda key, text: self.share(number, key, text),
            report_failure=lambda failure: failure,
        )

    def ask(self, word):
        self.asked = word

    def share(self, number, key, text):
        self.said[key, number] = text
        for supervisor, workers in self.nodes:
            supervisor._read_status(workers)
        return [said for (name, _), said in self.said.items() if name == key]


def together(tmp_path, *nodes):
    board = Board()
    for number, workers in enumerate(nodes):
        made = job(supervision=Supervision(hang_timeout=5.0))
        node = Node(number, Host(f"w{number}", (0,)), "")
        supervisor = Supervisor(
            made, node, board.rendezvous(number), cleanup=None, signals=None, folder=tmp_path, env={}
        )
        board.nodes.append((supervisor, workers))
    return board.nodes


def test_each_look_for_a_hang_is_a_fresh_one(tmp_path):
    """The first was in vain: the ranks had moved on. What was said then is not held against them later."""
    waits = record(3, waiting=True)
    workers = Workers("w0", 0, [waits, record(3, waiting=False)])
    (first, _), (_, other) = together(tmp_path, workers, Workers("w1", 1, [record(3, waiting=False, rank=1)]))
    assert first._hung(workers) is None
    workers.places, other.places = [record(8, waiting=True)], [record(9, waiting=False, phase="loading data", rank=1)]
    outcome = first._hung(workers)
    assert (
        outcome.failure.rank == 1 and "rank 1 on w1 is not there: step 9, phase 'loading data'" in outcome.failure.cause
    )


def test_a_rank_that_has_ended_is_waited_for(tmp_path):
    workers = Workers("w0", 1, [record(8, waiting=True, rank=1)], [record(7, waiting=True)])
    ((supervisor, _),) = together(tmp_path, workers)
    cause = supervisor._hung(workers).failure.cause
    assert cause.endswith("rank 0 on w0 is not there: step 7, phase 'forward', has ended, after all_reduce")


def test_a_rank_that_is_missing_is_named_with_its_role(tmp_path):
    workers = Workers("w0", 1, [record(8, waiting=True, rank=1)], [record(7, waiting=True, role="stage 0 of 2")])
    ((supervisor, _),) = together(tmp_path, workers)
    failure = supervisor._hung(workers).failure
    assert str(failure).startswith("rank 0 (stage 0 of 2) on w0 hung: rank 1 has waited")
    assert failure.trace.splitlines()[1].startswith("rank 0 (stage 0 of 2): ")


def test_records_lie_elsewhere_where_memory_is_full(monkeypatch, tmp_path):
    kept = []
    make, full = tempfile.mkdtemp, OSError(errno.ENOSPC, "No space left on device")

    def fails_in_memory(*words, dir=None, **more):
        if dir is not None:
            raise full
        return make(*words, dir=dir, **more)

    monkeypatch.setattr(node_main, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", fails_in_memory)
    cleanup, node = SimpleNamespace(remove=kept.append), Node(0, Host("w", (0,)), "")
    folder = node_main.job_folder(job(), node, cleanup)
    assert folder.parent == tmp_path and kept == [folder] and (folder / "pid").exists()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(LaunchError, match="No space left on device; .*No such file.*: free some space, or set"):
        node_main.job_folder(job(), node, cleanup)
