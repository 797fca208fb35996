"""Joining under a real mpirun, of Open MPI and of MPICH; skipped where these or mpi4py are not installed."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from breadth import choice

SOURCE = Path(__file__).parents[3] / "src"
SCRIPT = """
import json, os, sys, warnings
warnings.simplefilter("error", FutureWarning)
warnings.simplefilter("error", DeprecationWarning)
import torch
import mizzen.comm as comm
before = dict(os.environ)
world = comm.init_distributed(distributed_port=int(sys.argv[2]), **json.loads(sys.argv[3]))
value = torch.tensor([world.rank + 1.0])
comm.all_reduce(value)
same = {name: text for name, text in os.environ.items() if name in before} == before
said = [world.rank, world.size, world.local_rank, world.local_size, world.source, world.master_addr, world.master_port]
with open(f"{sys.argv[1]}/{world.rank}.json", "w") as file:
    json.dump({"world": said, "sum": value.item(), "untouched": same}, file)
comm.destroy_process_group()
"""
LAUNCHERS = {
    "openmpi": ("mpirun.openmpi", ["--allow-run-as-root", "--oversubscribe"]),
    "mpich": ("mpirun.mpich", []),
}
FOREIGN = {"openmpi": "mpich", "mpich": "openmpi"}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("MIZZEN_ACCELERATOR", "cpu")


def find(kind):
    program = shutil.which(LAUNCHERS[kind][0]) or shutil.which("mpirun")
    if program is None:
        pytest.skip(f"no mpirun of {kind} is installed")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    if ("Open MPI" in version or "OpenRTE" in version) != (kind == "openmpi"):
        pytest.skip(f"the mpirun that is installed is not that of {kind}")
    return program


def mpirun(folder, kind, port, *, abi=None, size=2, hidden=False, options=None):
    """Run the script on ranks; what each has found, and all that was printed."""
    program = find(kind)
    if importlib.util.find_spec("mpi4py") is None and not hidden:
        pytest.skip("mpi4py is not installed")
    (folder / "script.py").write_text(SCRIPT)
    paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    if hidden:
        (folder / "mpi4py").mkdir()
        (folder / "mpi4py" / "__init__.py").write_text("raise ModuleNotFoundError('hidden', name='mpi4py')")
        paths.insert(0, str(folder))
    command = [program, *LAUNCHERS[kind][1], "-n", str(size), sys.executable, str(folder / "script.py")]
    command += [str(folder), str(port), json.dumps(options or {})]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1", MIZZEN_TIMEOUT="1")
    # Wheels of mpi4py fit either MPI and guess which one is meant; with both installed they have to be told.
    environment["MPI4PY_MPIABI"] = abi or kind
    debian = next(Path("/usr/lib").glob("*/libmpich.so.12"), None)
    if debian is not None and environment["MPI4PY_MPIABI"] == "mpich":
        (folder / "lib").mkdir()
        (folder / "lib" / "libmpi.so.12").symlink_to(debian)  # the name under which everybody else has it
        environment["LD_LIBRARY_PATH"] = f"{folder / 'lib'}:{environment.get('LD_LIBRARY_PATH', '')}"
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    found = sorted(folder.glob("*.json"))
    return process.returncode, [json.loads(path.read_text()) for path in found], output


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_ranks_meet_through_mpi(tmp_path, port, kind):
    code, found, output = mpirun(tmp_path, kind, port)
    assert code == 0, output
    assert [row["world"] for row in found] == [[rank, 2, rank, 2, kind, "127.0.0.1", port] for rank in range(2)]
    assert all(row["sum"] == 3.0 and row["untouched"] for row in found)


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_a_busy_port_is_no_obstacle_when_mpi_can_tell_another(tmp_path, kind):
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, found, output = mpirun(tmp_path, kind, port)
    assert code == 0, output
    ports = {row["world"][-1] for row in found}
    assert len(ports) == 1 and port not in ports and all(row["sum"] == 3.0 for row in found)


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_an_mpi4py_of_the_other_mpi_is_noticed(tmp_path, port, kind):
    find(FOREIGN[kind])
    code, found, output = mpirun(tmp_path, kind, port, abi=FOREIGN[kind])
    assert code == 0, output
    assert all(row["sum"] == 3.0 for row in found)
    assert "mpirun has started 2 ranks, but mpi4py" in output and "sees 1" in output


@pytest.mark.parametrize("kind", choice(LAUNCHERS, ["openmpi"]))  # test_discover.py has the variables of both
def test_on_one_host_mpi4py_is_not_needed(tmp_path, port, kind):
    code, found, output = mpirun(tmp_path, kind, port, hidden=True)
    assert code == 0, output
    assert [row["world"] for row in found] == [[rank, 2, rank, 2, kind, "127.0.0.1", port] for rank in range(2)]
    assert "needs 'mpi4py'" in output


def test_discovery_can_be_turned_off(tmp_path, port):
    code, found, output = mpirun(tmp_path, "openmpi", port, options={"auto_mpi_discovery": False})
    assert code != 0 and not found
    assert "Open MPI says that this is rank" in output and "auto_mpi_discovery is off" in output
