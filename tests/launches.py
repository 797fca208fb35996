"""Starting `mizzen run` for real, and looking for what it leaves behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
SECRET = "known to the tests alone"
LONG = 200
"""Seconds, fewer than a test may take: where something has to come at once, a machine that is held up may be late."""
COMMAND = (sys.executable, "-m", "mizzen.cli", "run")


def environment(**more):
    """Our own, without what another launcher has left in it."""
    dropped = ("MIZZEN_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "PYTHONPATH": str(ROOT / "src"), "MIZZEN_ACCELERATOR": "cpu", "MIZZEN_SECRET": SECRET, **more}


def launch(*words, cwd, timeout=120, **more):
    """Run it to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@dataclass
class Running:
    """A launch that goes on."""

    process: subprocess.Popen
    log: Path
    family: set = field(default_factory=set)
    folders: set = field(default_factory=set)

    def signal(self, number):
        self.process.send_signal(number)

    def end(self, timeout=LONG):
        """Its exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            threads = psutil.Process(self.process.pid).num_threads()
            said = f"it has {threads} threads, {self.left()} of what it started live, and it has said:\n{self.text}"
            raise AssertionError(f"{self.process.args} has not ended within {timeout} s: {said}") from None
        finally:
            if self.process.poll() is None:
                self.process.kill()

    @property
    def text(self):
        return self.log.read_text(errors="replace")

    def remember_family(self):
        """Every process below it, now, and the folders of its supervisors."""
        self.family |= {one.pid for one in psutil.Process(self.process.pid).children(recursive=True)}
        ours = {str(pid) for pid in (*self.family, self.process.pid)}
        records = [path for base in ("/dev/shm", "/tmp") for path in Path(base).glob("mizzen-*-*/pid")]
        self.folders |= {path.parent for path in records if _read(path) in ours}

    def left(self):
        """Those of them that still live, and what they have left in memory and on disk."""
        shared = [
            Path(f"/dev/shm/{name}") for pid in self.family for name in (f"torch_{pid}_left", f"mizzen_left_{pid}")
        ]
        there = sorted(str(path) for path in (*self.folders, *shared) if path.exists())
        return sorted(pid for pid in self.family if _lives(pid)) + there


def _read(path):
    try:
        return path.read_text().strip()
    except OSError:  # of another job, which is over
        return ""


def _lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start(*words, cwd, name="run", **more):
    """Start it and go on."""
    log = Path(cwd) / f"{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*COMMAND, *map(str, words)],
            cwd=cwd,
            env=environment(**more),
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # Tests may run under nohup, and what it ignores is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
    return Running(process, log)


def wait_until(is_true, what, limit=LONG):
    until = time.monotonic() + limit
    while not is_true():
        assert time.monotonic() < until, f"{what}: not within {limit} s"
        time.sleep(0.05)
