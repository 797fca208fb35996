"""Every back end starts 2 x 2 ranks on two hosts; their sum is right, and every word arrives byte for byte."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from cluster.fuzz import words
from cluster.hosts import PORT, SYSTEM

RANK = Path(__file__).with_name("rank.py")
WORDS = 2000
BACKENDS = {
    "ssh": (),
    "pdsh": (),
    "openmpi": (),
    "mpich": ("--launcher_args", "-localhost {here}"),
}
"""What each needs here beside the port: MPICH would tell the hosts to call back at the name of this machine."""


def launch(cluster, name, tmp_path, *options, seed=0):
    """Start a job with fuzzed arguments and variables, and check what all four ranks have received."""
    results, canary = tmp_path / "results", tmp_path / "canary"
    results.mkdir()
    arguments = words(seed, WORDS, canary)
    values = words(seed + 1, WORDS, canary)
    variables = {f"NCCL_FUZZ_{number}": value for number, value in enumerate(values)}
    in_file = {f"FUZZ_{number}": value.replace("\n", "").rstrip("\r") for number, value in enumerate(values[:100])}
    text = "# made\n\nWANDB_API_KEY=PASSWORD\n" + "".join(f"{key}={value}\n" for key, value in in_file.items())
    (tmp_path / ".mizzen_env").write_bytes(text.encode(errors="surrogateescape"))
    variables["NCCL_FUZZ_RESULTS"] = str(results)
    cluster.environment = {
        **{key: value for key, value in cluster.environment.items() if "FUZZ" not in key}, **variables
    }  # fmt: skip
    ran = cluster.run(
        *(sys.executable, "-m", "mizzen.cli", "run", "--launcher", name, *options, RANK, *arguments), cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stdout.decode()[-2000:] + ran.stderr.decode()[-4000:]
    found = [json.loads((results / f"{rank}.json").read_text()) for rank in range(4)]
    assert [one["sum"] for one in found] == [6.0] * 4
    assert [one["world"] for one in found] == [4] * 4
    assert [one["local"] for one in found] == [
        ["0", "2", "0", "2"],
        ["1", "2", "0", "2"],
        ["0", "2", "1", "2"],
        ["1", "2", "1", "2"],
    ]
    assert [one["host"] for one in found] == ["node1", "node1", "node2", "node2"]
    for one in found:
        assert one["folder"] == str(tmp_path)
        assert one["argv"] == arguments
        assert one["environment"] == {**variables, **in_file}
        assert (one["password"], one["readable"]) == ("PASSWORD", []), "nobody else can read it"
    assert not canary.exists()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_back_end_starts_ranks_and_passes_every_word(cluster, tmp_path, name):
    program = {"openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}.get(name, name)
    if shutil.which(program, path=SYSTEM) is None:
        pytest.skip(f"{program} is not installed")
    options = [option.format(here=cluster.address(254)) for option in BACKENDS[name]]
    launch(cluster, name, tmp_path, "--hostfile", cluster.folder / "hostfile", "--ssh_port", str(PORT), *options)


@pytest.mark.parametrize("name", ["ssh", "pdsh"])
def test_a_hostfile_with_users(cluster, tmp_path, name):
    if shutil.which(name, path=SYSTEM) is None:
        pytest.skip(f"{name} is not installed")
    (tmp_path / "hosts").write_text("root@node1 slots=2\nroot@node2 slots=2\n")
    launch(cluster, name, tmp_path, "--hostfile", "hosts", "--ssh_port", str(PORT), seed=3)


def test_a_hostfile_with_addresses_of_ipv6(cluster, tmp_path):
    if not Path("/proc/sys/net/ipv6/conf/lo").exists():
        pytest.skip("this system has no IPv6")
    (tmp_path / "hosts").write_text(f"[{cluster.sixth(1)}] slots=2\nroot@{cluster.sixth(2)} slots=2\n")
    launch(cluster, "ssh", tmp_path, "--hostfile", "hosts", "--ssh_port", str(PORT), seed=5)


def test_slurm_starts_ranks_and_passes_every_word(slurm, tmp_path):
    address = ("--master_addr", slurm.address(1))
    launch(slurm, "slurm", tmp_path, "--hostfile", slurm.folder / "hostfile", *address, seed=8)


NAME = "import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], os.uname().nodename, flush=True)\n"


@pytest.mark.parametrize(
    ("before", "options", "shown"),
    [
        ((), ("--num_nodes", "2", "--master_addr", "{first}"), ["[rank 0] 0 2 node1", "[rank 1] 1 2 node2"]),
        (("salloc", "--quiet", "--nodes=2"), ("--exclude", "node1"), ["[rank 0] 0 1 node2"]),
    ],
    ids=["outside an allocation", "inside, with a filter"],
)
def test_slurm_without_a_hostfile(slurm, tmp_path, before, options, shown):
    (tmp_path / "name.py").write_text(NAME)
    words = (*before, sys.executable, "-m", "mizzen.cli", "run", "--launcher", "slurm", "--num_gpus", "1")
    words += tuple(option.format(first=slurm.address(1)) for option in options)
    ran = slurm.run(*words, "--show", "all", "name.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr.decode()
    assert sorted(ran.stdout.decode().splitlines()) == shown


def test_a_command_on_all_hosts(cluster):
    ran = cluster.run(
        *(sys.executable, "-m", "mizzen.cli", "ssh", "-f", cluster.folder / "hostfile", "--ssh_port", str(PORT)),
        *("sh", "-c", 'hostname; echo "$1"; exit 3', "x", "a  b;c"),
    )
    assert ran.returncode == 3
    assert sorted(ran.stdout.decode().splitlines()) == [
        "node1  a  b;c",
        "node1  node1",
        "node2  a  b;c",
        "node2  node2",
    ]
