"""Ranks that part ways: whatever becomes of a peer, the others get an error that names it, within seconds."""

import atexit
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist

import mizzen.comm as dist
from launches import wait_until
from mizzen.ambient import AMBIENT
from mizzen.comm.rank_status import RankStatus
from mizzen.errors import CommError
from mizzen.progress import get_progress

SOON = {"look": 1.0, "beat": 0.2, "silence": 20}
"""Patience for tests: looks several times as often as the default. Silence is for those who test it: a rank of a busy
machine may well be silent for a second."""


def parted(folder, culprit, fate, operation):
    """All ranks but one go into a collective; that one meets its fate instead. Returns what the others are told."""
    dist.set_patience(**SOON | ({"silence": 5} if fate == "is stopped" else {}))
    dist.all_reduce(torch.ones(1))
    get_progress().at(step=3, unit="layers.1", phase="forward")
    time.sleep(0.5)  # for a beat: what was never told cannot be known
    if dist.get_rank() == culprit:
        FATES[fate](folder)
    with pytest.raises(CommError) as caught:
        OPERATIONS[operation](culprit)
    (folder / str(dist.get_rank())).touch()
    return str(caught.value)


def end_orderly(folder=None):
    """What the end of the interpreter does to a rank, short of closing what the test itself has open."""
    atexit._run_exitfuncs()
    os._exit(0)


def end_with_an_error(folder):
    sys.last_value = KeyError("no such token")
    end_orderly()


KILLER = """
import os, sys, time
while len(os.listdir(sys.argv[1])) < 2:
    time.sleep(0.05)
os.kill(int(sys.argv[2]), 9)
"""


def stop(folder):
    """A stopped rank never ends by itself: it is killed when both others have said what they were told."""
    subprocess.Popen([sys.executable, "-S", "-c", KILLER, str(folder), str(os.getpid())])
    os.kill(os.getpid(), signal.SIGSTOP)


FATES = {
    "ends": end_orderly,
    "raises": end_with_an_error,
    "is killed": lambda folder: os.kill(os.getpid(), signal.SIGKILL),
    "vanishes": lambda folder: os._exit(7),
    "is stopped": stop,
}
OPERATIONS = {
    "all_reduce": lambda culprit: dist.all_reduce(torch.ones(1000)),
    "barrier": lambda culprit: dist.barrier(),
    "async": lambda culprit: dist.all_gather_into_tensor(torch.ones(3), torch.ones(1), async_op=True).wait(),
    "recv": lambda culprit: dist.recv(torch.ones(4), src=culprit),
    "objects": lambda culprit: dist.all_gather_object([None] * dist.get_world_size(), "x"),
}


@pytest.mark.parametrize(
    ("fate", "operation", "reason"),
    [
        ("ends", "all_reduce", r"rank 2 has left: its process ended \(it was at step 3"),
        ("raises", "barrier", r"rank 2 has left: its process ended with KeyError: 'no such token'"),
        ("is killed", "all_reduce", r"rank 2 was killed or has crashed: its process exists no more"),
        ("is killed", "recv", r"rank 2 was killed or has crashed"),
        ("is killed", "objects", r"rank 2 was killed or has crashed"),
        ("vanishes", "async", r"rank 2 was killed or has crashed"),
        ("is stopped", "all_reduce", r"rank 2 has not been heard of for \d+ s: it is stopped, frozen or cut off"),
        pytest.param("is stopped", "recv", r"rank 2 has not been heard of", marks=pytest.mark.wide),
    ],
)
def test_a_peer_that_is_gone_is_named(world, fate, operation, reason, tmp_path):
    outcomes = world(3).run(parted, tmp_path, 2, fate, operation, expect_failure=True, grace=30)
    for rank in (0, 1):
        assert outcomes[rank].error_type is None, outcomes[rank].traceback
        assert outcomes[rank].value.startswith(f"rank {rank} ")
        assert re.search(reason, outcomes[rank].value), outcomes[rank].value


@pytest.mark.parametrize("fate", ["is killed", "is stopped"])
def test_the_host_of_the_store_is_suspected_when_the_store_is_silent(world, fate, tmp_path):
    outcomes = world(3).run(parted, tmp_path, 0, fate, "all_reduce", expect_failure=True, grace=30)
    for rank in (1, 2):
        assert outcomes[rank].error_type is None, outcomes[rank].traceback
        assert outcomes[rank].value.startswith(f"rank {rank} ")
        assert "rank 0" in outcomes[rank].value


def another_collective():
    dist.set_patience(**SOON)
    rank = dist.get_rank()
    dist.barrier()
    with pytest.raises(CommError) as caught:
        if rank == 0:  # an operation that goes on beside the program is not compared before
            dist.all_reduce(torch.ones(4), async_op=True).wait()
        else:
            dist.broadcast(torch.ones(4), src=1, async_op=True).wait()
            dist.barrier()
    return str(caught.value)


def test_ranks_in_different_collectives_are_both_named(world):
    first, second = world(2).run(another_collective)
    assert "rank 0 waited" in first
    assert "in all_reduce (call 2 of all ranks)" in first
    assert "rank 1 entered broadcast from rank 1 as call 2 of all ranks: the ranks have parted ways" in first
    assert second.startswith("rank 1 ")
    assert "rank 0" in second


def other_roots():
    dist.set_patience(**SOON)
    rank = dist.get_rank()
    with pytest.raises(CommError) as caught:
        dist.reduce(torch.ones(4), dst=rank, async_op=True).wait()
        dist.barrier()
    return str(caught.value)


def test_roots_that_differ_are_named(world):
    first, second = world(2).run(other_roots)
    assert "rank 1 entered reduce to rank 1" in first
    assert "rank 0 entered reduce to rank 0" in second


def other_groups():
    dist.set_patience(**SOON)
    rank = dist.get_rank()
    pair = dist.new_group([0, 1], group_desc="pair")
    dist.barrier(pair)
    with pytest.raises(CommError) as caught:
        dist.barrier(pair if rank == 0 else None)
    dist.destroy_process_group()  # who was told leaves: the other need not see this wait to be told, too
    return str(caught.value)


def test_two_ranks_that_wait_for_each_other_in_different_groups_are_named(world):
    first, second = world(2).run(other_groups)
    assert first.startswith("rank 0 ") and "in barrier (call 2 of group 'pair' of ranks 0, 1): rank 1 " in first
    assert second.startswith("rank 1 ") and "in barrier (call 1 of all ranks): rank 0 " in second
    assert any("neither can go on" in each for each in (first, second))


OUTSIDE = {
    "barrier": lambda pair: torch_dist.barrier(),
    "all_reduce": lambda pair: torch_dist.all_reduce(torch.ones(3), group=pair),
    "broadcast": lambda pair: torch_dist.broadcast(torch.ones(3), 0),
    "all_gather_object": lambda pair: torch_dist.all_gather_object([None, None], "x", group=pair),
    "new_group": lambda pair: torch_dist.new_group([0, 1]),
}


def against_torch(operation, folder):
    dist.set_patience(**SOON)
    pair = torch_dist.new_group([0, 1])
    dist.barrier()
    if dist.get_rank() == 1:
        threading.Thread(target=lambda: (wait_until((folder / "told").exists, "rank 0", 50), os._exit(0))).start()
        OUTSIDE[operation](pair)  # it will never come back: rank 0 has gone elsewhere
    with pytest.raises(CommError) as caught:
        dist.all_gather_into_tensor(torch.ones(2), torch.ones(1))
    (folder / "told").touch()
    return str(caught.value)


@pytest.mark.parametrize("operation", OUTSIDE)
def test_a_rank_in_a_call_of_torch_itself_is_named_with_the_line(world, operation, tmp_path):
    first, _ = world(2).run(against_torch, operation, tmp_path, expect_failure=True, grace=30)
    assert first.error_type is None, first.traceback
    reason = rf"rank 1 waits for rank 0 in torch\.distributed\.{operation}\(\) at test_watchdog\.py:\d+, which is not"
    assert re.search(reason, first.value), first.value


def long_pauses():
    """Ranks that sleep, load data, or call torch for something that does not need the one that waits."""
    dist.set_patience(**SOON)
    rank = dist.get_rank()
    others = torch_dist.new_group([1, 2])
    if rank == 1:
        torch_dist.all_reduce(torch.ones(1), group=others)  # waits for rank 2, which is late
    if rank == 2:
        time.sleep(3)
        torch_dist.all_reduce(torch.ones(1), group=others)
    total = torch.ones(1)
    dist.all_reduce(total)
    half = torch.ones(1)
    if rank == 0:
        time.sleep(2)
        dist.all_reduce(half, async_op=True).wait()
    else:
        torch_dist.all_reduce(half)  # one operation by two names
    return total.item(), half.item()


def test_a_pause_is_no_hang(world):
    assert world(3).run(long_pauses) == [(3.0, 3.0)] * 3


def a_thread_that_waits_meanwhile():
    """A background thread waits in its own group for a rank whose main thread is late: that is no deadlock."""
    dist.set_patience(**SOON)
    rank = dist.get_rank()
    background = dist.new_group([0, 1])
    answers = []
    if rank == 1:
        thread = threading.Thread(target=lambda: answers.append(dist.barrier(background)))
        thread.start()
        time.sleep(2.5)
        dist.barrier()
    else:
        dist.barrier()
        dist.barrier(background)
        return True
    thread.join()
    return answers == [None]


def test_a_background_thread_may_wait(world):
    assert world(2).run(a_thread_that_waits_meanwhile) == [True, True]


def late():
    dist.set_patience(**SOON)
    if dist.get_rank() == 1:
        time.sleep(3)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.send(tensor, 1) if dist.get_rank() == 0 else (time.sleep(2), dist.recv(tensor, 0))
    return tensor.item()


def test_a_peer_that_is_only_late_is_waited_for(world):
    assert world(2).run(late) == [2.0, 2.0]


def never(folder):
    dist.set_patience(**SOON)
    dist.barrier()
    dist.set_patience(timeout=2.0)
    get_progress().at(step=4, phase="evaluate")
    if dist.get_rank() == 1:
        wait_until((folder / "told").exists, "what rank 0 is told", 30)
        return None
    started = time.monotonic()
    with pytest.raises(CommError) as caught:
        dist.all_reduce(torch.ones(1))
    (folder / "told").touch()
    return str(caught.value), time.monotonic() - started


def test_a_rank_that_never_comes_is_named_when_the_time_is_over(world, tmp_path):
    (message, seconds), _ = world(2).run(never, tmp_path)
    assert "in all_reduce (call 2 of all ranks): the limit is 2 s" in message
    assert "1 of 1 peers have not come: rank 1 (step 4, phase 'evaluate')" in message
    assert seconds > 2


def limits(folder):
    """The group's own limit, and that of one wait."""
    dist.set_patience(**SOON)
    dist.barrier()  # the limit is for making the group as well
    group = dist.new_group(timeout=timedelta(seconds=3))
    dist.barrier()
    if dist.get_rank() == 1:
        wait_until((folder / "told").exists, "what rank 0 is told", 30)
        return None
    said = []
    for wait in (
        lambda: dist.barrier(group),
        lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(timedelta(seconds=1.5)),
    ):
        with pytest.raises(CommError) as caught:
            wait()
        said.append(str(caught.value))
    (folder / "told").touch()
    return said


def test_a_group_and_a_wait_have_limits_of_their_own(world, tmp_path):
    (group, single), _ = world(2).run(limits, tmp_path)
    assert "limit is 3 s" in group or "Timed out waiting" in group  # gloo has the group's limit as well
    assert "limit is 1.5 s" in single


def failing_alone():
    """One rank's call is refused by torch; the others learn why it did not come."""
    dist.set_patience(**SOON)
    dist.barrier()
    with pytest.raises(RuntimeError) as caught:
        if dist.get_rank() == 1:
            dist.all_gather([torch.ones(1)], torch.ones(1))  # a list of the wrong length
        else:
            dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1))
    time.sleep(2)
    return str(caught.value)


def test_the_others_learn_why_a_rank_was_refused(world):
    waiting, refused = world(2).run(failing_alone)
    assert "rank 1 failed in it" in waiting
    assert refused.splitlines()[0][:30] in waiting


def leaves_by_destroying(folder):
    dist.set_patience(**SOON)
    dist.barrier()
    time.sleep(0.5)
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        wait_until((folder / "told").exists, "what rank 0 is told", 30)
        return ""
    with pytest.raises(CommError) as caught:
        dist.all_reduce(torch.ones(1))
    (folder / "told").touch()
    return str(caught.value)


def test_a_rank_that_destroyed_its_group_has_left(world, tmp_path):
    message, _ = world(2).run(leaves_by_destroying, tmp_path)
    assert "rank 1 has left: it has destroyed its process group" in message


def stale_record():
    """A record that an attempt before this one has left on the same store."""
    dist.set_patience(**SOON)
    if dist.get_rank() == 0:
        old = RankStatus(rank=1, process="elsewhere:1", beat=99, written=0.0, left="long ago")
        AMBIENT.comm.backend.store().set("status/1", old.pack())
    torch_dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(2)  # and has not begun to publish
    dist.all_reduce(torch.ones(1))
    return True


def test_records_of_an_earlier_attempt_count_for_nothing(world):
    assert world(2).run(stale_record) == [True, True]


def forked_child():
    """A forked child ends with its parent's exit handlers; the rank is still there."""
    dist.set_patience(**SOON)
    dist.barrier()
    if dist.get_rank() == 1:
        child = os.fork()
        if child == 0:
            end_orderly()
        os.waitpid(child, 0)
        time.sleep(2)
    dist.all_reduce(torch.ones(1))
    return not AMBIENT.comm.watchdog._status_thread.has_lost_the_store


def test_the_end_of_a_forked_child_is_not_the_end_of_the_rank(world):
    assert world(2).run(forked_child) == [True, True]


SCRIPT = """
import sys, time
import torch, torch.distributed
torch.distributed.init_process_group("gloo")
import mizzen.comm as dist
dist.set_patience(look=0.5, beat=0.2, silence=20)
dist.barrier()
if sys.argv[1] == "mismatch":
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4), async_op=True).wait()
    dist.broadcast(torch.ones(4), src=0, async_op=True).wait()
    dist.barrier()
elif sys.argv[1] == "unequal":
    dist.all_reduce(torch.ones(4 + dist.get_rank()))
elif sys.argv[1] == "torch":
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4))
    torch.distributed.broadcast(torch.ones(4), 0)
elif dist.get_rank() == 1:
    {}["missing"]
dist.all_reduce(torch.ones(4))
"""


def job(tmp_path, port, what):
    """Two real processes, started as torchrun would; (exit status, stderr) of each."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    source = str(Path(__file__).parents[3] / "src")
    processes = []
    for rank in range(2):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": source,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, str(script), what]
        processes.append(subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


@pytest.fixture
def port():
    """Held, so that nobody else gets it, until the job listens there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("raise", "rank 1 has left: its process ended with KeyError: 'missing'"),
        pytest.param(  # above it is told between forked ranks
            "mismatch", "rank 1 entered broadcast from rank 0 as call 2 of all ranks", marks=pytest.mark.wide
        ),
        pytest.param(
            "unequal",
            "rank 0 at all_reduce of 4 torch.float32; rank 1 at all_reduce of 5 torch.float32",
            marks=pytest.mark.wide,
        ),
        pytest.param(
            "torch",
            "rank 1 waits for rank 0 in torch.distributed.broadcast() at train.py:",
            marks=pytest.mark.wide,
        ),
    ],
)
def test_a_script_under_plain_torchrun_ends_with_the_reason(tmp_path, port, what, reason):
    (first, said), (second, _) = job(tmp_path, port, what)
    # torch aborts now and then when gloo is torn down after an error, with us or without.
    assert first in (1, -signal.SIGABRT)
    assert second in (1, -signal.SIGABRT)
    assert "mizzen.errors.CommError: " in said
    assert reason in said
