"""Waits on handles that a test controls: slices, limits, failures and what is accounted."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from mizzen.ambient import AMBIENT
from mizzen.comm import watchdog as module
from mizzen.comm.backend import Group, Request
from mizzen.comm.rank_status import GroupCalls, RankStatus
from mizzen.comm.watchdog import Patience, RankCalls, Watchdog, first_sentence, is_gone, this_process
from mizzen.errors import CommError
from mizzen.progress import Progress

ALL = Group("0", (0, 1), 0, "all ranks")
QUICK = Patience(timeout=60.0, look=0.01, silence=30.0, beat=0.02)
IMPATIENT = replace(QUICK, silence=1.0)
"""For tests of silence alone: on a busy machine a thread may well be silent for a second."""


class Handle:
    """Done after so many polls, or never; it notes how long it was waited for."""

    def __init__(self, polls=None, error=None):
        self.left, self.error, self.asked, self.is_abandoned = polls, error, [], False

    def poll(self, seconds):
        self.asked.append(seconds)
        if self.left is None:
            time.sleep(seconds)
            return False
        self.left -= 1
        if self.left >= 0:
            time.sleep(seconds)
        elif self.error:
            raise self.error
        return self.left < 0

    def is_completed(self):
        return False

    def abandon(self):
        self.is_abandoned = True


class Until(Handle):
    """Done when something is so."""

    def __init__(self, is_so):
        super().__init__()
        self.is_so = is_so

    def poll(self, seconds):
        time.sleep(seconds)
        return self.is_so()


class Store:
    """The store of a job in one process."""

    def __init__(self):
        self.values, self.is_broken = {}, False

    def set(self, key, value):
        if self.is_broken:
            raise RuntimeError("Broken pipe")
        self.values[key] = value

    def check(self, keys):
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key]


@pytest.fixture(autouse=True)
def own_record(monkeypatch):
    monkeypatch.setattr(AMBIENT, "progress", Progress())
    monkeypatch.setattr(module, "SLICE", 0.02)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def watch(store):
    made = Watchdog(0, 2, store, QUICK)
    yield made
    made.leave("the test is over")


def say(store, written=None, **fields):
    """Let rank 1 publish something."""
    store.set("status/1", RankStatus(1, "elsewhere:1", written=written or time.time(), **fields).pack())


def test_a_quick_wait_asks_once_and_is_accounted(watch):
    call = watch.begin(Request("all_reduce"), ALL)
    handle = Handle(0)
    watch.wait(call, handle)
    assert handle.asked == [module.SLICE]
    assert AMBIENT.progress.record.collective == "all_reduce"
    assert watch._calls_made.status().calls["0"] == GroupCalls(1, 1, ((1, "all_reduce"),))


def test_collectives_are_numbered_per_group_and_messages_are_not(watch):
    other = Group("1", (0, 1), 0, "others")
    message = Request("send", peers=(1,), detail="to rank 1")
    begun = [watch.begin(Request("barrier"), ALL), watch.begin(message, ALL), watch.begin(Request("barrier"), other)]
    begun.append(watch.begin(Request("all_reduce"), ALL))
    assert [call.number for call in begun] == [1, 0, 1, 2]
    assert [call.place for call in begun[:3]] == ["call 1 of all ranks", "a message in all ranks", "call 1 of others"]


def test_only_the_last_few_are_remembered(watch):
    for _ in range(20):
        watch.begin(Request("barrier"), ALL)
    calls = watch._calls_made.status().calls["0"]
    assert calls.issued == 20
    assert [number for number, _ in calls.recent] == list(range(5, 21))


def test_a_long_wait_is_sliced_and_seen_in_the_record(watch):
    seen = []

    class Observed(Handle):
        def poll(self, seconds):
            seen.append((AMBIENT.progress.record.waiting, len(watch._calls_made.waits)))
            return super().poll(seconds)

    watch.wait(watch.begin(Request("barrier"), ALL), Observed(5))
    assert seen == [(False, 0), (True, 0), (True, 1), (True, 1), (True, 1), (True, 1)]
    assert not AMBIENT.progress.record.waiting
    assert not watch._calls_made.waits


def test_a_peer_that_has_left_ends_the_wait(watch, store):
    say(store, left="its process ended", step=4)
    handle = Handle()
    call = watch.begin(Request("all_reduce"), ALL)
    with pytest.raises(
        CommError, match=r"^rank 0 waited \d+\.\d s in all_reduce \(call 1 of all ranks\): rank 1 has left"
    ):
        watch.wait(call, handle)
    assert handle.is_abandoned
    calls = watch._calls_made.status().calls["0"]
    assert (calls.finished, calls.failed) == (0, 1)
    assert "rank 1 has left" in calls.failure


def test_a_peer_that_ends_before_it_has_told_its_role_is_named_with_it(watch, store):
    watch.know_roles(lambda rank: f"stage {rank} of 2")
    say(store, left="its process ended")
    with pytest.raises(CommError, match=r"rank 1 \(stage 1 of 2\) has left"):
        watch.wait(watch.begin(Request("all_reduce"), ALL), Handle())


def test_a_record_of_an_earlier_attempt_is_no_news_until_it_changes(watch, store):
    say(store, written=1.0, beat=5, left="years ago")
    watch.wait(watch.begin(Request("all_reduce"), ALL), Until(lambda: bool(watch._status_thread._stale)))
    assert watch._status_thread.peer_statuses == {}
    handle = Handle()

    def publish_late():
        time.sleep(0.2)
        say(store, written=2.0, beat=6, left="just now, by a slow clock")

    thread = threading.Thread(target=publish_late)
    thread.start()
    with pytest.raises(CommError, match="rank 1 has left: just now"):
        watch.wait(watch.begin(Request("all_reduce"), ALL), handle)
    thread.join()


def test_silence_is_counted(watch, store):
    watch.patience = IMPATIENT
    say(store, beat=7)
    with pytest.raises(CommError, match="rank 1 has not been heard of for [1-9]\\d* s"):
        watch.wait(watch.begin(Request("all_reduce"), ALL), Handle())


def test_a_store_that_breaks_is_silence_too(watch, store):
    watch.patience = IMPATIENT
    call = watch.begin(Request("all_reduce"), ALL)
    store.is_broken = True
    with pytest.raises(
        CommError, match=r"the job's store has not answered for [1-9]\d* s: the process that hosts it \(rank 0"
    ):
        watch.wait(call, Handle())


def test_the_limit_of_a_wait(watch, store):
    say(store, calls={"0": GroupCalls()}, phase="evaluate")
    heard = Group("9", (0, 1), 0, "x")
    watch.wait(watch.begin(Request("barrier"), heard), Until(lambda: 1 in watch._status_thread.peer_statuses))
    with pytest.raises(CommError, match=r"limit is 0\.3 s; 1 of 1 peers have not come: rank 1 \(phase 'evaluate'\)"):
        watch.wait(watch.begin(Request("all_reduce"), ALL), Handle(), timeout=0.3)
    limited = Group("2", (0, 3), 0, "limited", timeout=0.2)
    with pytest.raises(CommError, match=r"limit is 0\.2 s; 1 of 1 peers have not come: rank 3 \(never heard of\)"):
        watch.wait(watch.begin(Request("all_reduce"), limited), Handle())


def test_without_a_store_only_the_limit_ends_a_wait():
    alone = Watchdog(0, 2, None, Patience(timeout=0.1, look=0.01))
    with pytest.raises(CommError, match=r"limit is 0\.1 s"):
        alone.wait(alone.begin(Request("barrier"), ALL), Handle())
    alone.leave("nothing happens")


LOST = (
    "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:5. This is typically caused by a crash."
)


def test_a_lost_connection_is_explained_by_who_left(watch, store):
    watch.patience = replace(QUICK, look=10.0)
    say(store, left="its process ended with KeyError: 'x'")
    call = watch.begin(Request("all_reduce"), ALL)
    with pytest.raises(CommError) as caught:
        watch.wait(call, Handle(0, RuntimeError(LOST)))
    assert "rank 1 has left: its process ended with KeyError: 'x'. The backend says: Connection closed by peer" in str(
        caught.value
    )
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_lost_connection_without_a_culprit_says_so(watch):
    with pytest.raises(CommError, match="it is not known which rank has left"):
        watch.wait(watch.begin(Request("all_reduce"), ALL), Handle(0, RuntimeError(LOST)))


def test_an_error_of_another_kind_is_passed_on_at_once(watch):
    with pytest.raises(
        CommError, match=r"failed after \d+\.\d s in all_reduce \(call 1 of all ranks\): Invalid scalar type"
    ):
        watch.wait(watch.begin(Request("all_reduce"), ALL), Handle(0, RuntimeError("Invalid scalar type")))


def test_a_call_that_is_refused_is_told_to_the_others(watch):
    call = watch.begin(Request("all_reduce"), ALL)
    assert watch.refuse(call, ValueError("no such thing\nat all")) is None
    assert watch._calls_made.status().calls["0"].failure == "ValueError: no such thing"
    assert isinstance(watch.refuse(call, RuntimeError(LOST)), CommError)


def test_leaving_is_published(store):
    made = Watchdog(0, 2, store, replace(QUICK, beat=5.0))
    made.begin(Request("barrier"), ALL)
    made.leave("it was told to")
    assert RankStatus.unpack(store.values["status/0"]).left == "it was told to"


def test_patience_can_be_changed_later(watch, store):
    watch.begin(Request("barrier"), ALL)
    watch.patience = Patience(beat=0.5)
    assert watch._status_thread.beat == 0.5


def test_an_account_says_whether_the_main_thread_waits():
    calls_made = RankCalls(0)
    call = calls_made.begin(Request("barrier"), ALL)
    found = []

    def wait():
        with calls_made.waiting(call) as entry:
            found.append((entry.on_main_thread, entry.peers))

    wait()
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert found == [(True, (1,)), (False, (1,))]


def test_a_process_that_has_ended_is_gone():
    assert not is_gone(this_process())
    machine = this_process().rpartition(":")[0]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not is_gone(f"{machine}:{child.pid}")
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(f"{machine}:{child.pid}")  # a zombie is gone, too
    assert is_gone(f"{machine}:{child.pid}")
    assert not is_gone(f"another machine:{child.pid}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (LOST, "Connection closed by peer [10.0.0.1]:5"),
        ("Invalid scalar type", "Invalid scalar type"),
        ("first line\nsecond line", "first line"),
        ("[rank 3] no place in sources", "[rank 3] no place in sources"),
    ],
)
def test_the_first_sentence_of_an_error(text, sentence):
    assert first_sentence(RuntimeError(text)) == sentence


LEAVING = """
import os, signal, time
from mizzen.comm.watchdog import RankCalls
from mizzen.comm.watchdog import StatusThread

class Store:
    def set(self, key, value):
        if "its process ended" in str(value):
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.3)
            print("told", flush=True)

StatusThread(RankCalls(0), Store(), size=2, beat=0.5)
"""


def test_a_machine_that_is_paused_at_the_end_does_not_cut_the_last_word_short():
    process = subprocess.Popen([sys.executable, "-c", LEAVING], stdout=subprocess.PIPE, text=True)
    os.waitpid(process.pid, os.WUNTRACED)
    time.sleep(1.2)  # longer than the last word may take
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=60)[0] == "told\n" and process.returncode == 0
