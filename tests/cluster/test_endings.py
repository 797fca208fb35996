"""A job on two hosts that fails, is asked to stop, or loses its launcher: the code is right, and nothing is left."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from cluster.hosts import PORT, wait_for

SLEEPER = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def leave(number, frame):
    (folder / f"told-{os.environ['RANK']}").write_text(str(number))
    sys.exit(0)
signal.signal(signal.SIGUSR1, leave)
(folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
if sys.argv[2] == "fail" and os.environ["RANK"] == "3":
    while len(list(folder.glob("pid-*"))) < 4:
        time.sleep(0.05)
    sys.exit(9)
time.sleep(1000)
"""


def begin(cluster, tmp_path, name, *words):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    options = ("--hostfile", cluster.folder / "hostfile", "--ssh_port", PORT)
    if name == "slurm":
        options = ("--hostfile", cluster.folder / "hostfile", "--master_addr", cluster.address(1))
    command = (sys.executable, "-m", "mizzen.cli", "run", "--launcher", name, *options, "--no_local_rank", "sleeper.py")
    process = subprocess.Popen(
        [str(word) for word in (*command, tmp_path, *words)],
        cwd=tmp_path, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 4 or process.poll() is not None, "the ranks")
    return process


def left(tmp_path):
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("name", ["ssh", "pdsh", "openmpi", "slurm"])
def test_the_code_of_the_first_failure(cluster, request, tmp_path, name):
    if name == "slurm":
        request.getfixturevalue("slurm")
    process = begin(cluster, tmp_path, name, "fail")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 9, out.decode()
    assert out.decode().splitlines()[-1] == "mizzen: rank 3 on node2 ended with exit code 9", (
        "whatever the program says"
    )
    wait_for(lambda: not left(tmp_path), "the end of all ranks")


@pytest.mark.parametrize("name", ["ssh", "pdsh", "openmpi", "slurm"])
def test_a_request_reaches_every_rank(cluster, request, tmp_path, name):
    if name == "slurm":
        request.getfixturevalue("slurm")
    process = begin(cluster, tmp_path, name, "wait")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, (process.returncode, out.decode())
    assert sorted(path.name for path in tmp_path.glob("told-*")) == [f"told-{rank}" for rank in range(4)]


@pytest.mark.parametrize("name", ["ssh", "pdsh", "openmpi"])
def test_nothing_is_left_on_any_host_when_the_launcher_is_killed(cluster, tmp_path, name):
    process = begin(cluster, tmp_path, name, "wait")
    assert len(left(tmp_path)) == 4
    process.kill()
    process.wait()
    wait_for(lambda: not left(tmp_path), "the end of all ranks")
    wait_for(lambda: not [name for name in os.listdir("/dev/shm") if "-node" in name], "the end of all folders")
