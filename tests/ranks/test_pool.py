"""The pool that all rank tests stand on: results, failures of every kind, healing, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pool import Origin, Pool, RankFailed, World

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Point:
    x: int


def who_am_i(offset, *, scale=1):
    return (dist.get_rank() + offset) * scale, dist.get_world_size()


def add_up(tensor):
    dist.all_reduce(tensor)
    return tensor


def surroundings():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "FROM_THE_TEST")
    return {name: os.environ.get(name) for name in names}, os.getcwd(), dist.is_initialized(), torch.get_num_threads()


def join_by_hand():
    dist.init_process_group("gloo")
    return dist.get_world_size()


def tensors():
    base = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    return {
        "view": base[:, 1:],
        "bf16": base.bfloat16(),
        "parameter": torch.nn.Parameter(base),
        "point": Point(dist.get_rank()),
    }


def raise_on(rank):
    print(f"rank {dist.get_rank()} speaks")
    dist.barrier()  # all have joined
    if dist.get_rank() == rank:
        raise ValueError(f"broken on purpose, rank {rank}")
    dist.barrier()


def raise_and_let_the_others_wait(rank):
    dist.barrier()  # all have joined
    if dist.get_rank() == rank:
        raise ValueError("alone")
    time.sleep(600)


def assert_something():
    wanted, found = 3, dist.get_rank()
    assert found == wanted


def hang_on(rank):
    if dist.get_rank() == rank:
        time.sleep(600)
    return dist.get_rank()


def hang_in_a_collective():
    if dist.get_rank() == 0:
        dist.barrier()
    return dist.get_rank()


def kill_on(rank, number):
    if dist.get_rank() == rank:
        print("last words")
        os.kill(os.getpid(), number)
    dist.barrier()


def leave(status):
    os._exit(status)


def wait_for_a_dead_peer():
    dist.barrier()  # all have joined
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.5)
    return "patient"


def start_a_child():
    return os.getpid(), subprocess.Popen(["sleep", "600"]).pid


def kill_the_zygote(folder):
    (folder / str(dist.get_rank())).write_text(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def train():
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    return model.weight.grad[0, 0].item()


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_gone_soon(pid):
    patience = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < patience:
        time.sleep(0.02)
    return not is_alive(pid)


def test_results_come_in_rank_order(world):
    assert world(3).run(who_am_i, 10, scale=2) == [(20, 3), (22, 3), (24, 3)]


def test_ranks_share_one_process_group(world):
    total = world(2).run(add_up, torch.tensor([1.0, 2.0]))
    assert [each.tolist() for each in total] == [[2.0, 4.0], [2.0, 4.0]]


def test_ranks_have_the_variables_and_the_folder_of_the_test(world, monkeypatch, tmp_path):
    monkeypatch.setenv("FROM_THE_TEST", "yes")
    monkeypatch.chdir(tmp_path)
    for rank, (names, folder, joined, threads) in enumerate(world(2, init=False).run(surroundings)):
        assert names == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "LOCAL_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "FROM_THE_TEST": "yes",
        }
        assert (folder, joined, threads) == (str(tmp_path), False, 1)


def test_uninitialised_ranks_can_join_through_the_environment(world):
    assert world(2, init=False).run(join_by_hand) == [2, 2]


def test_tensors_come_back_as_tensors_and_classes_as_themselves(world):
    for rank, result in enumerate(world(2).run(tensors)):
        assert result["view"].tolist() == [[1.0, 2.0], [4.0, 5.0]]
        assert result["bf16"].dtype is torch.bfloat16
        assert isinstance(result["parameter"], torch.nn.Parameter) and result["parameter"].requires_grad
        assert result["point"] == Point(rank)


def test_training_works_in_a_forked_rank_again_and_again(world):
    assert [world(2).run(train) for _ in range(3)] == [[4.0, 4.0]] * 3


def test_a_rank_that_raises_fails_the_test_with_its_traceback_and_the_others(world, capsys):
    with pytest.raises(RankFailed) as failure:
        world(2).run(raise_on, 1, grace=20)
    assert [outcome.rank for outcome in failure.value.outcomes] == [1, 0]
    text = str(failure.value)
    assert text.index("ValueError: broken on purpose, rank 1") < text.index("--- rank 0: RuntimeError")
    assert "dist.barrier()" in text.split("--- rank 0")[1]
    assert "zygote.py" not in text.split("--- rank 0")[0]
    assert "rank 0 speaks" in capsys.readouterr().out


def test_ranks_that_wait_for_a_failed_one_are_stopped_after_the_grace(world):
    outcomes = world(2).run(raise_and_let_the_others_wait, 0, expect_failure=True, grace=1)
    assert [outcome.error_type for outcome in outcomes] == ["ValueError", "Stopped"]
    assert "raise_and_let_the_others_wait" in outcomes[1].traceback


def test_a_failed_assertion_shows_its_values(world):
    with pytest.raises(RankFailed, match="wanted = 3"):
        world(1).run(assert_something)


def test_a_rank_that_hangs_is_named_with_its_stack(world):
    with pytest.raises(RankFailed, match=r"1 of 2 ranks") as failure:
        world(2).run(hang_on, 1, timeout=10)
    (hung,) = [outcome for outcome in failure.value.outcomes if outcome.error_type]
    assert (hung.rank, hung.error_type) == (1, "Timeout")
    assert "in hang_on" in str(failure.value)


@pytest.mark.wide
def test_a_rank_that_hangs_inside_a_collective_shows_where(world):
    with pytest.raises(RankFailed, match=r"in hang_in_a_collective"):
        world(2).run(hang_in_a_collective, timeout=10)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV], ids=lambda number: number.name)
def test_a_rank_that_is_killed_is_named_with_its_signal(world, number, capsys):
    outcomes = world(2).run(kill_on, 1, number, expect_failure=True, grace=20)
    assert (outcomes[1].signal, outcomes[1].error_type) == (number, number.name)
    assert outcomes[0].error_type == "RuntimeError"  # the peer sees the connection close
    assert "last words" in capsys.readouterr().out
    if number != signal.SIGKILL:
        assert "in kill_on" in outcomes[1].traceback


def test_a_rank_that_leaves_without_a_word_is_a_failure(world):
    (outcome,) = world(1).run(leave, 3, expect_failure=True)
    assert outcome.error_type == "Exited" and "status 3" in outcome.traceback


def test_a_longer_grace_lets_the_survivors_of_a_death_end(world):
    outcomes = world(2).run(wait_for_a_dead_peer, grace=20, expect_failure=True)
    assert (outcomes[0].value, outcomes[0].error_type) == ("patient", None)
    assert outcomes[1].signal == signal.SIGKILL


@pytest.mark.parametrize(
    "work", [(raise_on, 0), (hang_on, 0), (kill_on, 0, signal.SIGKILL)], ids=lambda work: work[0].__name__
)
def test_the_next_run_works_after_a_failure(world, work):
    with pytest.raises(RankFailed):
        world(2).run(*work, timeout=1, grace=0.1)
    assert world(2).run(who_am_i, 0) == [(0, 2), (1, 2)]


@pytest.mark.wide  # of the tests themselves
def test_ranks_die_with_the_zygote_and_the_next_run_has_a_new_one(world, tmp_path):
    with pytest.raises(RuntimeError, match="has died"):
        world(2).run(kill_the_zygote, tmp_path)
    ranks = [int(mark.read_text()) for mark in tmp_path.iterdir()]
    assert len(ranks) == 2 and all(map(is_gone_soon, ranks))
    assert world(2).run(who_am_i, 0) == [(0, 2), (1, 2)]


def parents():
    return os.getppid(), int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.wide  # of the tests themselves
def test_zygotes_of_one_origin_end_each_by_itself_and_all_with_it(tmp_path):
    origin = Origin()
    one, other, third = pools = [Pool(origin=origin.address) for _ in range(3)]
    try:
        first, second, last = (World(pool, 1, None).run(parents)[0] for pool in pools)
        assert len({first[0], second[0], last[0]}) == 3 and first[1] == second[1] == last[1]
        one.close()
        assert is_gone_soon(first[0]) and World(other, 1, None).run(parents) == [second]
        with pytest.raises(RuntimeError, match="has died"):
            World(other, 1, "gloo").run(kill_the_zygote, tmp_path)
        assert is_gone_soon(second[0]) and World(other, 1, None).run(parents)[0][1] == first[1]
        os.kill(first[1], signal.SIGKILL)
        assert is_gone_soon(last[0])
    finally:
        for pool in pools:
            pool.close()
        origin.close()
    assert not os.path.exists(origin.address)


def test_nothing_a_rank_has_started_outlives_the_run(world):
    for rank, child in world(2).run(start_a_child):
        assert is_gone_soon(rank) and is_gone_soon(child)


def divide(number):
    return os.getpid(), dist.get_rank() + 6 // number


def test_cases_run_one_after_the_other_on_the_same_ranks(world):
    first, second = world(2).each(divide, [(2,), (3,)])
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert ([result for _, result in first], [result for _, result in second]) == ([3, 4], [2, 3])
    with pytest.raises(RankFailed, match=r"ZeroDivisionError[^$]*in the case \(0,\)"):
        world(2).each(divide, [(1,), (0,)])


def test_the_zygote_has_one_thread(world, pool):
    world(2).run(train)
    assert len(os.listdir(f"/proc/{pool.pid}/task")) == 1


def test_a_function_that_ranks_cannot_import_is_refused(world):
    with pytest.raises(TypeError, match="top level"):
        world(1).run(lambda: 1)


OUTSIDE = f"""
import os, sys, time
from pathlib import Path
sys.path[:0] = [{str(TESTS)!r}, os.getcwd()]
from pool import Pool, World

def sleep():
    Path(os.environ["RANK"]).write_text(f"{{os.getpid()}} {{os.getppid()}} .")
    time.sleep(600)

if __name__ == "__main__":
    import outside
    World(Pool(), 2, None).run(outside.sleep)
"""


@pytest.mark.wide
def test_no_rank_outlives_the_tests(tmp_path):
    (tmp_path / "outside.py").write_text(OUTSIDE)
    marks = [tmp_path / "0", tmp_path / "1"]
    with subprocess.Popen([sys.executable, "outside.py"], cwd=tmp_path) as program:
        try:
            patience = time.monotonic() + 250  # it imports all that ranks need, on a machine that may be busy
            while not all(mark.exists() and "." in mark.read_text() for mark in marks):
                assert time.monotonic() < patience and program.poll() is None
                time.sleep(0.05)
        finally:
            program.kill()
    ranks, zygotes = zip(*(map(int, mark.read_text().split()[:2]) for mark in marks), strict=True)
    assert all(map(is_gone_soon, (*ranks, *zygotes)))


SPEAKS = """
import atexit, os, sys, threading
print(sys.argv[1:], os.getcwd() == sys.argv[1], os.environ["FROM_THE_TEST"], __name__)
print("aside", file=sys.stderr)
atexit.register(print, "at the end")
threading.Timer(0.1, print, ["a thread"]).start()
"""


def test_a_program_has_its_words_its_folder_its_variables_and_an_end(python, tmp_path):
    (tmp_path / "speaks.py").write_text(SPEAKS + "sys.exit(int(sys.argv[2]))")
    environment = {**os.environ, "FROM_THE_TEST": "yes"}
    expected = f"{[str(tmp_path), '3']} True yes __main__\na thread\nat the end\n"
    for words in (
        ("speaks.py",),
        ("-m", "speaks"),
        ("-c", "import runpy; runpy.run_path('speaks.py', None, '__main__')"),
    ):
        ran = python(*words, tmp_path, 3, cwd=tmp_path, env=environment)
        assert (ran.returncode, ran.stdout, ran.stderr) == (3, expected, "aside\n")


@pytest.mark.parametrize(
    ("code", "ended", "said"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_a_program_ends_as_any_other(python, code, ended, said):
    ran = python("-c", code)
    assert ran.returncode == ended and ran.stderr.endswith(said) and bool(ran.stderr) == bool(said)


def test_a_program_that_hangs_is_ended_with_what_it_has_started(python):
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        python("-c", code, timeout=5)
    assert is_gone_soon(int(raised.value.output))
