"""`mizzen run` on one machine: what ranks are given, how a job ends, that nothing is left. Most ranks load no torch."""

import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from breadth import FULL, choice
from launches import COMMAND, environment, launch, start, wait_until

HELLO = """
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR FROM_FILE GLOO_SOCKET_IFNAME".split()
found = {name: os.environ.get(name) for name in names} | {"argv": sys.argv[1:], "path": os.getcwd()}
for part in json.dumps(found), "second":
    for half in part[:9], part[9:] + "\\n":
        sys.stdout.write(half); sys.stdout.flush()
"""


def test_what_ranks_are_given_and_what_becomes_of_their_words(tmp_path):
    """In a folder with an odd name, too."""
    tmp_path = tmp_path / "a b;é$(x)"
    tmp_path.mkdir()
    (tmp_path / "hello.py").write_text(HELLO)
    (tmp_path / ".mizzen_env").write_text("# comment\n\nFROM_FILE=a=b c\n")
    words = ("--show", "all", "--enable_each_rank_log", "logs", "--num_gpus", "3", "hello.py", "a b", "--show", "$(x)")
    ran = launch(*words, cwd=tmp_path, MIZZEN_INTERFACE="lo")
    assert ran.returncode == 0, ran.stderr
    for rank in range(3):
        first, second = (tmp_path / f"logs/rank{rank}.log").read_text().splitlines()
        found = json.loads(first)
        assert found.pop("argv") == [f"--local_rank={rank}", "a b", "--show", "$(x)"]
        assert found == {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_SIZE": "3", "CROSS_RANK": "0"},
            **{"CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "FROM_FILE": "a=b c", "path": str(tmp_path)},
            "GLOO_SOCKET_IFNAME": "lo",
        }
        assert f"[rank {rank}] {first}\n" in ran.stdout and f"[rank {rank}] second\n" in ran.stdout
    assert len(ran.stdout.splitlines()) == 6, "no line is mixed with another"


PEEK = """
import os
from mizzen.errors import LaunchError
from mizzen.launcher.job import Job
assert os.environ["WANDB_API_KEY"] == "PASSWORD"
assert "MIZZEN_SECRET" not in os.environ and len(os.environ["MIZZEN_KEY"]) == 64
for pid in (os.getpid(), os.getppid()):
    for word in open(f"/proc/{pid}/cmdline").read().split("\\0"):
        assert "PASSWORD" not in word, word
        try:
            Job.decode(word)
        except LaunchError:
            continue
        raise AssertionError("the job can be read by everybody")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc as Linux has it")
@pytest.mark.parametrize(
    "way",
    [pytest.param(("--num_gpus", 1), marks=pytest.mark.wide), ("--hostfile", "hosts")],
    ids=["here", "by ssh"],
)
def test_what_is_in_environment_files_is_in_no_command_line(tmp_path, way):
    (tmp_path / "peek.py").write_text(PEEK)
    (tmp_path / ".mizzen_env").write_text("WANDB_API_KEY=PASSWORD\n")
    (tmp_path / "hosts").write_text("w1 slots=1\n")
    ran = launch(*way, "--no_local_rank", "peek.py", cwd=tmp_path, PATH=with_ssh(tmp_path))
    assert ran.returncode == 0, ran.stderr
    shown = launch(*way, "--dry-run", "peek.py", cwd=tmp_path, PATH=with_ssh(tmp_path)).stdout
    assert "WANDB_API_KEY (its value is not shown)" in shown and "PASSWORD" not in shown


def test_a_job_of_any_length_goes_by_ssh(tmp_path):
    (tmp_path / "count.py").write_text(COUNT)
    (tmp_path / "hosts").write_text("w1 slots=1\n")
    words = [random.Random(number).randbytes(50_000).hex() for number in range(4)]
    ran = launch("--hostfile", "hosts", "--no_local_rank", "count.py", *words, cwd=tmp_path, PATH=with_ssh(tmp_path))
    assert (ran.returncode, ran.stdout.strip()) == (0, hashlib.sha256("".join(words).encode()).hexdigest()), ran.stderr


def test_a_port_that_is_taken(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        words = ("--num_nodes", 2, "--num_gpus", 1, "--no_ssh", "--node_rank", 0, "--master_addr", "127.0.0.1")
        ran = launch(*words, "--master_port", port, "t.py", cwd=tmp_path)
    assert ran.returncode == 1
    assert f"mizzen: error: port {port} of this machine cannot be had" in ran.stderr


COUNT = """
import hashlib, os, sys
print(hashlib.sha256("".join(sys.argv[1:]).encode()).hexdigest())
"""


def test_as_many_words_as_the_system_allows_arrive_on_this_machine(tmp_path):
    (tmp_path / "count.py").write_text(COUNT)
    words = [random.Random(number).randbytes(50_000).hex() for number in range(4)]
    ran = launch("--num_gpus", 1, "--no_local_rank", "count.py", *words, cwd=tmp_path)
    assert (ran.returncode, ran.stdout.strip()) == (0, hashlib.sha256("".join(words).encode()).hexdigest()), ran.stderr
    (tmp_path / ".mizzen_env").write_text(f"LONG={words[0]}{words[1]}\n")
    ran = launch("--num_gpus", 1, "count.py", cwd=tmp_path)
    assert ran.returncode == 1 and "the longest of them 200,006; this system allows" in ran.stderr


FAIL = """
import os, sys, time
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, flush=True)
open(f"said-{rank}-{attempt}", "w").close()
while not os.path.exists(f"said-0-{attempt}"):  # whose words are shown speaks before another fails
    time.sleep(0.01)
if rank == "1" and attempt < int(sys.argv[2]):
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), 9)
    if sys.argv[1] == "exit":
        sys.exit(7)
    if sys.argv[1] == "say":
        sys.exit("no data")
    raise ValueError("bad luck")
if attempt < int(sys.argv[2]):
    time.sleep(100)
"""


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("kill", 137, "mizzen: rank 1 on localhost was ended by signal 9 (SIGKILL): most often the kernel"),
        ("exit", 7, "mizzen: rank 1 on localhost ended with exit code 7"),
        pytest.param("say", 1, "mizzen: rank 1 on localhost ended with exit code 1", marks=pytest.mark.wide),
        ("raise", 1, "mizzen: rank 1 on localhost ended with exit code 1"),
    ],
)
def test_the_first_failure_is_the_last_thing_said(tmp_path, how, code, last):
    (tmp_path / "fail.py").write_text(FAIL)
    ran = launch("--num_gpus", 2, "--no_local_rank", "fail.py", how, 1, cwd=tmp_path)
    assert ran.returncode == code
    assert ran.stderr.splitlines()[-1].startswith(last)
    if how in ("raise", "say"):
        assert ran.stderr.splitlines()[-2] == {"raise": "ValueError: bad luck", "say": "no data"}[how]


def test_a_failed_job_starts_again_so_often_as_it_may(tmp_path):
    (tmp_path / "fail.py").write_text(FAIL)
    ran = launch("--num_gpus", 2, "--no_local_rank", "--max_restarts", 2, "fail.py", "exit", 2, cwd=tmp_path)
    assert ran.returncode == 0
    assert ran.stdout.split() == ["attempt", "0", "attempt", "1", "attempt", "2"]
    assert "restart 2 of 2" in ran.stderr


@pytest.mark.parametrize("code", choice([75, 76], [75]))
def test_the_codes_of_a_stop_are_failures_where_nobody_asked(tmp_path, code):
    (tmp_path / "fail.py").write_text(FAIL.replace("sys.exit(7)", f"sys.exit({code})"))
    ran = launch("--num_gpus", 2, "--no_local_rank", "--max_restarts", 1, "fail.py", "exit", 2, cwd=tmp_path)
    assert ran.returncode == code
    assert ran.stdout.split() == ["attempt", "0", "attempt", "1"]
    said = f"mizzen: rank 1 on localhost ended with exit code {code}"
    assert ran.stderr.splitlines() == [f"{said}; restart 1 of 1", said]


@pytest.mark.parametrize("closed", choice(["<&-", ">&-", "2>&-", "<&- >&- 2>&-"], ["<&- >&- 2>&-"]))
def test_streams_that_are_closed(tmp_path, closed):
    """The job runs, its ranks have all three, and it ends as any other."""
    text = (
        "import os, sys\nfor number in range(3): os.fstat(number)\nprint('out')\nopen('ran', 'w').close(); sys.exit(7)"
    )
    (tmp_path / "script.py").write_text(text)
    command = (*COMMAND, "--num_gpus", "1", "--no_local_rank", "script.py")
    ran = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 7 and (tmp_path / "ran").exists(), ran.stderr
    assert ran.stdout == ("" if ">&-" in closed.replace("2>&-", "") else "out\n")
    assert ran.stderr == ("" if "2>&-" in closed else "mizzen: rank 0 on localhost ended with exit code 7\n")


FAMILY = """
import os, signal, subprocess, sys, time
from multiprocessing import shared_memory
if sys.argv[-1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
alone = "import os, time; open('/dev/shm/torch_%d_left' % os.getpid(), 'w'); time.sleep(1000)"
subprocess.Popen([sys.executable, "-S", "-c", alone], start_new_session=True)
shared_memory.SharedMemory(create=True, size=1, name="left_%d" % os.getpid())
open("/dev/shm/torch_%d_left" % os.getpid(), "w").close()
open(os.environ["RANK"], "w").close()
time.sleep(1000)
"""


@pytest.fixture
def family(tmp_path):
    """A job of two ranks with two children each, one of them in a session of its own, under way."""

    def begin(*words):
        (tmp_path / "family.py").write_text(FAMILY)
        for rank in "01":
            (tmp_path / rank).unlink(missing_ok=True)
        running = start("--num_gpus", 2, "--grace", 10_000, "family.py", *words, cwd=tmp_path)
        wait_until(lambda: all((tmp_path / rank).exists() for rank in "01"), "the ranks")
        running.remember_family()
        assert len(running.family) >= 7 and running.folders
        return running

    return begin


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process groups and /proc as Linux has them")
@pytest.mark.parametrize(
    ("number", "word", "code"),
    [
        (signal.SIGKILL, "", -9),
        (signal.SIGTERM, "", 76),
        pytest.param(signal.SIGINT, "", 76, marks=pytest.mark.wide),
        (signal.SIGHUP, "deaf", 129),
    ],
    ids=["kill", "term", "int", "hangup"],
)
def test_nothing_is_left_whatever_ends_it(family, number, word, code):
    running = family(word)
    running.signal(number)
    assert running.end() == code, running.text
    wait_until(lambda: not running.left(), f"left: {running.left()}")


def test_a_second_signal_ends_at_once(family):
    running = family("deaf")
    running.signal(signal.SIGTERM)
    wait_until(lambda: "they get the signal" in running.text, "the first signal")
    running.signal(signal.SIGTERM)
    assert running.end() == 143
    wait_until(lambda: not running.left(), "the end of all")


ASKED = """
import faulthandler, os
from mizzen.progress import STACKS
os.kill(os.getpid(), STACKS)
faulthandler.register(STACKS)
faulthandler.unregister(STACKS)  # as an interpreter that ends does
os.kill(os.getpid(), STACKS)
"""


def test_a_rank_that_cannot_answer_outlives_a_question_for_its_stack(tmp_path):
    (tmp_path / "asked.py").write_text(ASKED)
    ran = launch("--num_gpus", 1, "--no_local_rank", "asked.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_a_program_that_is_not_there(tmp_path):
    ran = launch("--num_gpus", 1, "--no_python", "./nothing", cwd=tmp_path)
    assert ran.returncode == 1
    assert "mizzen: error: ./nothing cannot be started" in ran.stderr


MEET = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 2:
    os.kill(os.getpid(), 9)
dist.all_reduce(total)
print("total", total.item(), os.environ["LOCAL_RANK"], os.environ["CROSS_RANK"], flush=True)
dist.destroy_process_group()
"""


MEET_WITHOUT_TORCH = """
import os, socket, time
from multiprocessing.connection import Client, Listener
rank, size, start = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()  # the store of all starts

def all_reduce(value):
    if rank:
        peers[0].send(value)
        return peers[0].recv()
    value += sum(peer.recv() for peer in peers)
    for peer in peers:
        peer.send(value)
    return value

def first():
    while True:
        try:
            return Client(f"door{start}")
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.05)

if rank:
    peers = [first()]
else:
    with Listener(f"door{start}") as door:
        peers = [door.accept() for _ in range(size - 1)]
total = all_reduce(rank + 1.0)
if start == "0" and rank == 2:
    os.kill(os.getpid(), 9)
try:
    total = all_reduce(total)
except (EOFError, ConnectionError):
    time.sleep(600)  # as one that waits for the dead; its supervisor ends it
print("total", total, os.environ["LOCAL_RANK"], os.environ["CROSS_RANK"], flush=True)
"""


@pytest.mark.parametrize("script", [MEET_WITHOUT_TORCH, MEET] if FULL else [MEET_WITHOUT_TORCH])
def test_two_supervisors_with_uneven_slots_start_again_together(tmp_path, port, script):
    """The way of `--no_ssh`: the same command on each node. The first has two ranks, the second has one."""
    (tmp_path / "meet.py").write_text(script)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=1\n")
    words = ("--hostfile", "hosts", "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", port, "--show", "all")
    nodes = [
        start(*words, "--max_restarts", 1, "--node_rank", node, "meet.py", cwd=tmp_path, name=f"node{node}")
        for node in (0, 1)
    ]
    assert [node.end() for node in nodes] == [0, 0], nodes[0].text + nodes[1].text
    assert {"[rank 0] total 18.0 0 0", "[rank 1] total 18.0 1 0"} <= set(nodes[0].text.splitlines())
    assert "[rank 2] total 18.0 0 1" in nodes[1].text
    assert "rank 2 on b was ended by signal 9" in nodes[1].text and "restart 1 of 1" in nodes[1].text
    assert "mizzen: rank 2" not in nodes[0].text, "the node of the failed rank speaks for all"


SLEEP = """
import os, sys, time
rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
open(f"up-{rank}-{size}", "w").close()
while not os.path.exists(f"go-{rank}-{size}"):
    time.sleep(0.05)
    if os.path.exists(f"fall-{size}"):
        raise RuntimeError(open(f"fall-{size}").read() or "Connection closed by peer")
"""


@pytest.fixture
def pair(tmp_path, port):
    """Nodes whose ranks never talk to each other, under way; two, where nothing else is said."""
    nodes = []

    def begin(*words, count=2):
        (tmp_path / "sleep.py").write_text(SLEEP)
        words = ("--num_nodes", count, "--num_gpus", 1, "--no_ssh", "--grace", 10_000, *words)
        words += ("--master_addr", "127.0.0.1", "--master_port", port)
        nodes.extend(
            start(*words, "--node_rank", node, "sleep.py", cwd=tmp_path, name=f"node{node}") for node in range(count)
        )
        wait_until(lambda: all((tmp_path / f"up-{rank}-{count}").exists() for rank in range(count)), "the ranks")
        for node in nodes:
            node.remember_family()
        return nodes

    yield begin
    for node in nodes:
        node.process.kill()


@pytest.mark.parametrize(
    ("number", "has_ended", "last"),
    [
        (signal.SIGKILL, True, "is lost: its supervisor has ended without a word"),
        pytest.param(
            *(signal.SIGTERM, False, "has left: stopped by SIGTERM; nothing could be saved"), marks=pytest.mark.wide
        ),
        pytest.param(  # 15 s are long, 120 where its ranks start first; clocks of tests/unit/launcher pass them at once
            *(signal.SIGSTOP, False, "is lost: its supervisor has not been heard of for (15|120) s"),
            marks=pytest.mark.wide,
        ),
    ],
    ids=["killed", "left", "stopped"],
)
def test_a_job_that_needs_a_node_ends_with_it(pair, tmp_path, number, has_ended, last):
    """Whether or not the ranks of the other node still run."""
    first, second = pair()
    second.signal(number)
    if has_ended:
        (tmp_path / "go-0-2").touch()
    assert first.end() == 1, first.text
    assert re.fullmatch(re.escape("mizzen: node 1 (node1) ") + last, first.text.splitlines()[-1]), first.text
    wait_until(lambda: not first.left(), "the end of all")


@pytest.mark.parametrize("number", choice([signal.SIGKILL, signal.SIGTERM], [signal.SIGKILL]), ids=["lost", "left"])
def test_an_elastic_job_goes_on_without_a_node(pair, tmp_path, number):
    first, second = pair("--min_elastic_nodes", 1, "--max_elastic_nodes", 2)
    second.signal(number)
    wait_until((tmp_path / "up-0-1").exists, "a world of one")
    (tmp_path / "go-0-1").touch()
    assert first.end() == 0, first.text
    assert "node 1 (node1) " in first.text and "the ranks start again" in first.text


@pytest.mark.wide
def test_ranks_that_fall_with_a_node_are_not_blamed(pair, tmp_path):
    """Both nodes that are left name the third."""
    first, second, third = pair("--max_restarts", 1, count=3)
    third.signal(signal.SIGKILL)
    third.end()
    (tmp_path / "fall-3").touch()
    for node in (first, second):
        assert node.end() == 1, node.text
        lost = "node 2 (node2) is lost: its supervisor has ended without a word"
        assert node.text.splitlines()[-1].endswith(lost)


@pytest.mark.parametrize("words", choice(["Connection closed by peer", "no word of why"], ["no word of why"]))
def test_a_killed_node_costs_an_elastic_job_no_restart(pair, tmp_path, words):
    """None is left, and the ranks of the other node have fallen with it, whatever they say."""
    first, second = pair("--min_elastic_nodes", 1, "--max_elastic_nodes", 2, "--max_restarts", 0)
    second.signal(signal.SIGKILL)
    second.end()
    (tmp_path / "falling").write_text(words)
    (tmp_path / "falling").rename(tmp_path / "fall-2")
    wait_until((tmp_path / "up-0-1").exists, "a world of one")
    (tmp_path / "go-0-1").touch()
    assert first.end() == 0, first.text
    lost = "node 1 (node1) is lost: its supervisor has ended without a word"
    assert first.text.splitlines()[-1] == f"mizzen: {lost}: the ranks start again", first.text


@pytest.mark.wide
def test_two_of_three_nodes_go_on(pair, tmp_path):
    """The ranks of the nodes that stay fall when the one in the middle leaves; that is no failure of theirs."""
    first, second, third = pair("--min_elastic_nodes", 2, "--max_elastic_nodes", 3, count=3)
    second.signal(signal.SIGTERM)
    assert second.end() == 76, second.text
    (tmp_path / "fall-3").touch()
    wait_until(lambda: all((tmp_path / f"up-{rank}-2").exists() for rank in (0, 1)), "a world of two")
    for rank in (0, 1):
        (tmp_path / f"go-{rank}-2").touch()
    assert (first.end(), third.end()) == (0, 0), first.text + third.text
    for node in (first, third):
        assert "node 1 (node1) has left: stopped by SIGTERM" in node.text and "restart 1" not in node.text


@pytest.mark.wide
def test_a_node_whose_ranks_are_done_may_go(pair, tmp_path):
    """It waits for no grace, and the others go on."""
    first, second = pair()
    (tmp_path / "go-1-2").touch()
    wait_until(lambda: len(second.left()) < len(second.family) + len(second.folders), "the end of the rank")
    second.signal(signal.SIGTERM)
    assert second.end() == 143, second.text
    assert "the ranks of this node are done" in second.text
    time.sleep(5)
    (tmp_path / "go-0-2").touch()
    assert first.end() == 0, first.text


def test_a_node_that_waits_for_the_first_one_heeds_a_request(tmp_path, port):
    """The first node is never started."""
    words = ("--num_nodes", 2, "--num_gpus", 1, "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", port)
    node = start(*words, "--node_rank", 1, "t.py", cwd=tmp_path, name="node1")

    def is_up():
        node.remember_family()
        return node.folders

    wait_until(is_up, "the supervisor")
    time.sleep(1)
    node.signal(signal.SIGINT)
    assert node.end() == 76, node.text
    assert node.text == "mizzen: stopped before the ranks started\n" and not node.left()


SSH = """#!/bin/sh
for line; do :; done
exec sh -c "$line"
"""


def with_ssh(folder):
    """A PATH with an ssh that stays on this machine."""
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize("code", choice([98, 255], [255]))
def test_the_code_of_a_script_comes_through_ssh_as_it_is(tmp_path, code):
    """255 has a meaning of its own where no rank has run."""
    (tmp_path / "hosts").write_text("w1 slots=1\n")
    (tmp_path / "exit.py").write_text(f"import sys; print('runs'); sys.exit({code})")
    ran = launch("--hostfile", "hosts", "--no_local_rank", "exit.py", cwd=tmp_path, PATH=with_ssh(tmp_path))
    assert (ran.returncode, ran.stdout) == (code, "runs\n")
    assert ran.stderr.splitlines() == [f"mizzen: rank 0 on w1 ended with exit code {code}"]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("mizzen/launcher/launch.py", "stopped by SIGTERM before the ranks started"),
        ("mizzen/launcher/node_main.py", "stopped before the ranks started"),
    ],
)
def test_a_request_while_the_launcher_loads_is_heeded(tmp_path, module, said):
    """The signal comes when this module is loaded, in the launcher or in the supervisor that it becomes."""
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == {module[:-3].replace("/", ".")!r}:
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
"""
    )
    (tmp_path / "script.py").write_text("raise SystemExit('it ran')")
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    ran = launch("--num_gpus", 1, "script.py", cwd=tmp_path, PYTHONPATH=path)
    assert (ran.returncode, ran.stderr) == (76, f"mizzen: {said}\n")
