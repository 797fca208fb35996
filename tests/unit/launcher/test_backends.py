"""The commands of each back end: what is typed, and that no word of the user's is in it."""

import os
import stat
import subprocess

import pytest

from mizzen.errors import UsageError
from mizzen.launcher.backends import NAMES, VARIABLE, Pdsh, RemoteOptions, copy_line, find_backend, supervisor
from mizzen.launcher.hosts import Host
from unit.launcher.test_job import job

EVIL = "$(touch canary); %h, 'x'"


@pytest.fixture
def evil():
    from mizzen.launcher.job import Program

    return job(program=Program("script", EVIL, (EVIL,)), environment={"NCCL_X": EVIL}, folder=EVIL)


@pytest.mark.parametrize("name", NAMES)
def test_no_word_of_the_user_is_seen(name, evil):
    for command in find_backend(name.upper()).commands(evil, RemoteOptions()):
        for word in (*command.words, *command.environment.values()):
            assert "canary" not in word and "$(" not in word


@pytest.mark.parametrize("name", NAMES)
def test_the_job_is_no_argument(name, evil):
    """Whoever is on the machine can read arguments, and a job has secrets."""
    for command in find_backend(name).commands(evil, RemoteOptions()):
        assert not any(evil.encode()[:40] in word for word in command.words)
        is_in_variable = command.environment.get(VARIABLE) == evil.encode()
        assert is_in_variable == (command.handover == "variable")


def test_a_job_is_brought_to_a_file_of_its_user_alone(tmp_path):
    line = copy_line(job(), "w0").replace("/dev/shm", str(tmp_path))
    path = tmp_path / job().file("w0")
    for code, content in ((0, "first"), (2, "second")):
        ran = subprocess.run(["sh", "-c", line], input=content, text=True, check=False, capture_output=True)
        assert ran.returncode == code, "what is there already may be somebody else's"
        assert path.read_text() == "first"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


@pytest.mark.parametrize("name", NAMES)
def test_users_and_addresses_of_hosts(name):
    backend = find_backend(name)
    made = job(hosts=(Host("w0", (0,), "ann"), Host("2001:db8::1", (0,))))
    typed = " ".join(word for command in backend.commands(made, RemoteOptions()) for word in command.words)
    assert ("ann@w0" in typed) == backend.requirements.takes_users == (name in ("ssh", "pdsh"))
    assert backend.requirements.takes_ipv6 == (name == "ssh")


@pytest.mark.parametrize("name", NAMES)
def test_one_supervisor_per_host(name):
    commands = find_backend(name).commands(job(), RemoteOptions())
    assert [host for command in commands for host in command.hosts] == ["w0", "w1"]
    assert " ".join(commands[0].words).count("mizzen.launcher.node") in (1, 2)


def test_ssh():
    first, second = find_backend("ssh").commands(job(), RemoteOptions(("-v",), 2222))
    assert first.words[:8] == ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-p", "2222", "-v")
    assert first.words[8] == "w0" and second.words[8] == "w1"
    assert second.words[9] == "exec /usr/bin/python3 -u -m mizzen.launcher.node --node 1 -"
    assert first.channel == "line"


def test_a_script_is_sourced_first():
    line = supervisor(job(), RemoteOptions(venv_script="/my venv/activate"), "--node", "0")
    python = "exec python"
    assert line == f"exec sh -c '. '\"'\"'/my venv/activate'\"'\"' && {python} -u -m mizzen.launcher.node --node 0'"
    (command,) = find_backend("openmpi").commands(job(), RemoteOptions(venv_script="/v"))
    assert command.words[command.words.index("sh") : command.words.index(":")] == (
        "sh",
        "-c",
        f'. /v && {python} -u -m mizzen.launcher.node "$@"',
        "mizzen",
        "--node",
        "0",
    )


def test_pdsh_adds_to_what_the_user_has():
    way = RemoteOptions(ssh_port=2222, environment={"PDSH_SSH_ARGS_APPEND": "-i key"})
    (command,) = Pdsh().commands(job(python="/opt/HOST/100%/python"), way)
    assert command.environment == {"PDSH_SSH_ARGS_APPEND": "-i key -o BatchMode=yes -p 2222"}
    assert command.words[:10] == ("pdsh", "-S", "-N", "-R", "ssh", "-f", "1024", "-w", "w0,w1", command.words[-1])
    assert "--host %h mizzen-a1-job-%h" in command.words[-1] and "/opt/HOST/100%%/python" in command.words[-1]
    assert "--ask stop a1" in Pdsh().ask(job(), way, "stop").words[-1]


def test_open_mpi_has_a_block_for_each_host():
    (command,) = find_backend("openmpi").commands(job(), RemoteOptions(("--tag-output",), 2222, is_root=True))
    start = ("mpirun", "--allow-run-as-root", "--bind-to", "none", "--mca", "plm_rsh_args", "-p 2222", "--tag-output")
    assert command.words[:8] == start
    blocks = " ".join(command.words[8:]).split(" : ")
    assert [block.split("mizzen.launcher.node ")[1] for block in blocks] == ["--node 0", "--node 1"]
    assert ["--host w0" in blocks[0], "--host w1" in blocks[1]] == [True, True]


def test_the_family_of_mpich():
    for name, variable in (
        ("mpich", "HYDRA_LAUNCHER_EXTRA_ARGS"),
        ("impi", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"),
        ("mvapich", "HYDRA_LAUNCHER_EXTRA_ARGS"),
    ):
        (command,) = find_backend(name).commands(job(), RemoteOptions(ssh_port=2222))
        assert command.environment[variable] == "-p 2222"
        assert command.words[3:7] == ("-hosts", "w0,w1", "-ppn", "1")


def test_slurm():
    (command,) = find_backend("slurm").commands(job(), RemoteOptions(("--partition=gpu",)))
    assert "--nodelist=w0,w1" in command.words and "--partition=gpu" in command.words
    assert command.words[-1] == "--slurm"


def test_an_unknown_name():
    with pytest.raises(UsageError, match="--launcher rsh: unknown; known: ssh, pdsh"):
        find_backend("rsh")
