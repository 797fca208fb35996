"""What the launcher makes of how its commands end: the code of a script, of ssh itself, of a port that is taken."""

import signal
from dataclasses import dataclass

import pytest

from mizzen.errors import LaunchError
from mizzen.launcher.backends import BACKENDS, RemoteCommand, Requirements
from mizzen.launcher.hosts import Host
from mizzen.launcher.job import ENDED, SAID, TAKEN, Job, Program
from mizzen.launcher.launch import LaunchPlan
from mizzen.launcher.start import execute, find_program


@dataclass
class Shell:
    """A back end whose commands are lines for a shell on this machine."""

    line: str
    name = "ssh"
    requirements = Requirements(("sh",), "dash")

    def commands(self, job, way):
        return (RemoteCommand(("ssh", "-c", self.line), ("w",), channel="line"),)


@pytest.fixture
def ended(tmp_path):
    """The exit code of a launch, and how often it was tried."""
    before = {number: signal.getsignal(number) for number in (15, 2, signal.SIGUSR1, signal.SIGHUP)}

    def run(line):
        job = Job(
            "j1", Program("script", "t.py"), (Host("w", (0,)),), str(tmp_path), "python", reports_to_launcher=True
        )
        log = tmp_path / "log"
        log.write_text("")
        shell = Shell(f"echo >> '{log}'; {line.replace('SAY', 'echo ' + job.last_word())}")
        return execute(LaunchPlan(job, backend=shell), {}), len(log.read_text())

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def test_255_is_of_ssh_unless_the_supervisor_has_said_its_last_word(ended, capfd):
    assert ended("exit 255") == (1, 1)
    assert capfd.readouterr().err.count("error: ssh to w has failed") == 1
    assert ended(f"printf open >&2; SAY{ENDED} >&2; exit 255") == (255, 1)
    assert capfd.readouterr().err == "open\n"


def test_a_port_is_taken_where_the_supervisor_says_so(ended, capfd):
    assert ended(f"SAY{ENDED} >&2; exit 98") == (98, 1)
    assert ended(f"SAY'{TAKEN}' >&2; exit 1") == (1, 5)
    assert "last-word" not in capfd.readouterr().err


def test_the_words_of_a_supervisor_come_after_those_of_the_program(ended, capfd):
    said = f"SAY'{SAID}  File a' >&2; SAY'{SAID}rank 3 ended' >&2; SAY{ENDED} >&2"
    assert ended(f"{said}; echo mpirun has a word to say >&2; echo and more; exit 9") == (9, 1)
    out, err = capfd.readouterr()
    assert (out, err) == ("and more\n", "mpirun has a word to say\n  File a\nrank 3 ended\n")


def test_a_program_that_is_asked_to_stop_before_a_supervisor_runs(ended, capfd):
    assert ended("kill -USR1 $PPID; read word; kill -USR1 $$") == (76, 1)
    assert ended(f"kill -USR1 $PPID; read word; SAY{ENDED} >&2; exit 75") == (75, 1)
    assert ended(f"kill -USR1 $PPID; read word; SAY'{TAKEN}' >&2; exit 98") == (76, 1), "no other port is tried then"


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_program_that_is_missing_is_named_with_where_it_comes_from(backend, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    has_package = backend.name not in ("impi", "mvapich")
    with pytest.raises(LaunchError, match="install the Debian package" if has_package else r"\(.*Debian has no"):
        find_program(backend)
