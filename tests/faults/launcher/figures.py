"""`make faults-launcher`: faults in number, and what became of them. A failure is printed with what repeats it."""

import argparse
import base64
import os
import pickle
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from faults.launcher.test_recovery import curve
from launches import COMMAND, environment, launch, start, wait_until

TRAIN = Path(__file__).with_name("train.py")
STEPS = 30
HANG = 3
"""Seconds that a rank may wait in R8."""
WORDS = ("--num_gpus", 2, "--max_restarts", 1, TRAIN, "--steps", STEPS)


@dataclass
class Row:
    """One line of the table."""

    name: str
    what: str
    most: float = float("inf")
    """Seconds that one run may take; longer is a failure."""
    median: float = float("inf")
    """The same for the median of all."""
    runs: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def case(self, label: str, run: Callable[[Path], float | None]) -> None:
        """Run one case in a folder of its own, and count it."""
        self.runs += 1
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            try:
                seconds = run(Path(folder))
            except (AssertionError, OSError, ValueError, subprocess.SubprocessError) as error:
                self.fail(f"{label}: {type(error).__name__}: {str(error)[:300]}")
                return
        if seconds is not None:
            self.seconds.append(seconds)
            if seconds > self.most:
                self.fail(f"{label}: {seconds:.2f} s, and {self.most:g} s are the limit")

    def close(self) -> "Row":
        """All runs are over."""
        if self.seconds and statistics.median(self.seconds) > self.median:
            self.fail(f"a median of {statistics.median(self.seconds):.2f} s, and {self.median:g} s are the limit")
        return self

    def fail(self, why: str) -> None:
        self.failures.append(why)
        print(f"  {self.name} failed: {why}", flush=True)

    def __str__(self) -> str:
        times = ""
        if self.seconds:
            times = f"median {statistics.median(self.seconds):.2f} s, most {max(self.seconds):.2f} s"
        return f"| {self.name} | {self.what} | {self.runs} | {len(self.failures)} | {times} |"


def starts(folder):
    return [line.split(maxsplit=3) for line in (folder / "starts.txt").read_text().splitlines()]


def killed(chance, count, whole):
    what = "kill -9 of a rank at a step; bitwise after one restart; from the kill to the resumed engine"
    row = Row("R1", what, median=8.0)
    for number in range(count):
        stage = chance.choice((1, 3))
        fault = f"kill@{chance.randrange(2)}:{chance.randrange(1, STEPS - 1)}"

        def run(folder, stage=stage, fault=fault):
            ran = launch(*WORDS, "--out", folder, "--stage", stage, "--faults", fault, cwd=folder)
            assert ran.returncode == 0, ran.stderr[-300:]
            begun = starts(folder)
            assert len(begun) == 2, f"{len(begun) - 1} restarts"
            assert curve(folder) == whole(stage), "the curve differs"
            return float(begun[1][0]) - float((folder / "fault.txt").read_text())

        row.case(f"#{number} --stage {stage} --faults {fault}", run)
    return row


def preempted(chance, count):
    row = Row("R7", "SIGTERM in step, evaluation and save: the current step is committed; from signal to end")
    for number in range(count):
        kind, after = ("step", "eval", "save")[number % 3], chance.randrange(2, 20)
        delay, signals = chance.random() * 0.2, chance.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
        target = chance.choice(("launcher", "one rank"))
        more = {"step": ("--every", 1000), "eval": ("--evaluate", 1, "--every", 1000), "save": ("--every", 1)}[kind]

        def run(folder, after=after, delay=delay, signals=signals, more=more, target=target):
            job = start(*WORDS[:5], "--steps", 10_000, "--out", folder, "--pause", 0.01, *more, cwd=folder)
            losses = folder / "loss-0.txt"
            wait_until(lambda: losses.exists() and f"\n{after} " in losses.read_text(), f"step {after}")
            time.sleep(delay)
            began = time.monotonic()
            if target == "launcher":
                job.signal(signals)
            else:
                os.kill(chance.choice(ranks_of(job)), signals)
            assert job.end() == 75, job.text[-300:]
            took = time.monotonic() - began
            assert (folder / "checkpoints" / f"global_step{max(curve(folder))}" / "manifest.json").is_file()
            return took

        row.case(f"#{number} {kind} after step {after} + {delay:.3f} s, signal {signals} to {target}", run)
    return row


def ranks_of(job):
    """The processes of its ranks."""
    below = psutil.Process(job.process.pid).children(recursive=True)
    return [process.pid for process in below if TRAIN.name in " ".join(process.cmdline())]


def hung(chance, count):
    what = f"a rank stopped, in a loop, holding the lock, or with a stuck worker; limit {HANG} s; fault to report"
    row = Row("R8", what, most=HANG + 5.0)
    for number in range(count):
        kind = ("stop", "loop", "lock", "sleep")[number % 4]
        fault = f"{kind}@{chance.randrange(2)}:{chance.randrange(5, 15)}"

        def run(folder, fault=fault):
            job = start(*WORDS, "--out", folder, "--hang", HANG, "--faults", fault, cwd=folder)
            wait_until(lambda: "hung: rank" in job.text or job.process.poll() is not None, "the report")
            said, text = time.time(), job.text
            assert "hung: rank" in text, f"ended with {job.process.poll()} and no report: {text[-250:]}"
            code = job.end(120)
            assert code == 0, f"ended with {code}: {job.text[-250:]}"
            who = fault.partition("@")[2].partition(":")[0]
            said_so = [line for line in job.text.splitlines() if "hung: rank" in line]
            assert any(f"mizzen: rank {who} on localhost hung" in line for line in said_so), said_so
            return said - float((folder / "fault.txt").read_text())

        row.case(f"#{number} --faults {fault}", run)
    return row


JOIN = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"


def ports(count, at_once=8):
    row = Row("R13", "launches, eight at a time, whose ranks meet")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "join.py").write_text(JOIN)
        for first in range(0, count, at_once):
            jobs = [
                start("--num_gpus", 2, "--no_local_rank", "join.py", cwd=folder, name=f"run{number}")
                for number in range(first, min(first + at_once, count))
            ]
            for job in jobs:
                row.runs += 1
                if job.end(300) != 0:
                    row.failures.append(job.text[-300:])
    return row


FAMILY = """
import os, subprocess, sys, time
for is_alone in (False, True):
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"], start_new_session=is_alone)
open("rank" + os.environ["RANK"], "w").write(str(os.getpid()))
time.sleep(1000)
"""


def orphans(chance, count):
    row = Row("R14", "the launcher or a rank killed, or the terminal closed; until nothing is left")
    for number in range(count):
        how = chance.choice(("launcher", "rank", "hangup", "term"))

        def run(folder, how=how):
            (folder / "family.py").write_text(FAMILY)
            job = start("--num_gpus", 2, "--no_local_rank", "family.py", cwd=folder)
            ranks = [folder / f"rank{rank}" for rank in range(2)]
            wait_until(lambda: all(path.exists() and path.read_text() for path in ranks), "the ranks")
            job.remember_family()
            began = time.monotonic()
            if how == "rank":
                os.kill(int(chance.choice(ranks).read_text()), signal.SIGKILL)
            else:
                number = {"launcher": signal.SIGKILL, "hangup": signal.SIGHUP, "term": signal.SIGTERM}[how]
                job.signal(number)
            job.end()
            wait_until(lambda: not job.left(), "what is left", 5)
            return time.monotonic() - began

        row.case(f"#{number} {how}", run)
    return row


def elastic(port):
    """The options of one node of two that may come and go."""
    own = ("--no_ssh", "--num_nodes", 2, "--num_gpus", 1, "--min_elastic_nodes", 1, "--max_elastic_nodes", 2)
    return (*own, "--master_addr", "127.0.0.1", "--master_port", port, "--node_rank")


def rejoined(chance, count):
    row = Row("rejoin", "a node killed, come back, and one or both asked to stop at any moment: both end with 75 or 76")
    for number in range(count):
        port, delay = chance.randrange(15_000, 19_000), chance.random() * 6
        asked = chance.choice(("both", "the first", "the one that came"))

        def run(folder, port=port, delay=delay, asked=asked):
            rest = (TRAIN, "--out", folder, "--steps", 2000, "--pause", 0.02, "--elastic", "--every", 10)
            first, second = (start(*elastic(port), node, *rest, cwd=folder, name=f"node{node}") for node in (0, 1))
            losses = folder / "loss-0.txt"
            wait_until(lambda: losses.exists() and "\n15 " in losses.read_text(), "step 15")
            second.signal(signal.SIGKILL)
            wait_until(lambda: len(starts(folder)) == 2, "one node alone")
            third = start(*elastic(port), 1, *rest, cwd=folder, name="again")

            def is_up():
                third.remember_family()
                return third.folders

            wait_until(is_up, "the supervisor")  # until then a signal may come before there is anybody to receive it
            time.sleep(delay)
            for node in {"both": (first, third), "the first": (first,)}.get(asked, (third,)):
                node.signal(signal.SIGTERM)
            codes = [third.end()]
            if asked == "the one that came":
                first.signal(signal.SIGTERM)
            codes.append(first.end())
            assert set(codes) <= {75, 76}, f"{codes}: {first.text[-250:]} {third.text[-250:]}"

        row.case(f"#{number} port {port}, {asked} after {delay:.2f} s", run)
    return row


CANARY = "bomb"


class Bomb:
    """What makes a folder where it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder / CANARY),)


def annoy(chance, place, folder):
    """One stranger at a port: noise, a forged pickle, the language of torch's store, or silence."""
    bomb = pickle.dumps(Bomb(folder))
    said = chance.choice((chance.randbytes(chance.randrange(1, 5000)), bomb, in_store(base64.b64encode(bomb)), b""))
    stranger = socket.create_connection(place, timeout=5)
    with suppress(OSError):
        stranger.sendall(said)
    return stranger


def in_store(value):
    """What a client of torch's store says to set what torch elastic, and supervisors, have kept there."""
    said = b"\0" + struct.pack("<I", 0x3C85F7CE)
    for key in (b"/torch.rendezvous.x", b"/failure", b"/request", b"/gone", b"/mizzen/status/never"):
        said += b"\1" + struct.pack("<Q", len(key)) + key + struct.pack("<Q", len(value)) + value
    return said


def open_ports(*jobs):
    """Every address and port at which a process of these jobs listens."""
    found = set()
    for job in jobs:
        whole = psutil.Process(job.process.pid)
        for process in (whole, *whole.children(recursive=True)):
            with suppress(psutil.Error):
                listening = (one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN)
                found |= {tuple(one.laddr) for one in listening}
    return sorted(found)


def visited(chance, count, whole):
    row = Row("strangers", "noise, forged pickles, keys in torch's store, silence: at every port, at any time")
    for number in range(count):
        port = chance.randrange(15_000, 19_000)

        def run(folder, port=port):
            own = ("--no_ssh", "--num_nodes", 2, "--num_gpus", 1, "--master_addr", "127.0.0.1", "--master_port", port)
            rest = (TRAIN, "--out", folder, "--stage", 1, "--steps", STEPS, "--pause", 0.1)
            first = start(*own, "--node_rank", 0, *rest, cwd=folder, name="node0")
            rendezvous = ("127.0.0.1", port)
            wait_until(lambda: rendezvous in open_ports(first), "the rendezvous port")
            guests = [annoy(chance, rendezvous, folder) for _ in range(20)]
            second = start(*own, "--node_rank", 1, *rest, cwd=folder, name="node1")
            losses = folder / "loss-0.txt"
            wait_until(lambda: losses.exists() and "\n3 " in losses.read_text(), "step 3")
            ports = open_ports(first, second)
            assert len(ports) >= 3, f"the rendezvous, the store and the ranks have ports, and these are {ports}"
            guests += [annoy(chance, each, folder) for each in ports for _ in range(5)]
            assert (first.end(), second.end()) == (0, 0), first.text[-500:] + second.text[-500:]
            assert not (folder / CANARY).exists(), "something was unpickled"
            assert curve(folder) == whole(1), "the curve differs"
            for guest in filter(None, guests):
                guest.close()

        row.case(f"#{number} port {port}", run)
    return row


def closed(count):
    row = Row("streams", "standard input, output, error, or all of them closed: the ranks run, and the code is theirs")
    for number in range(count):
        which = ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")[number % 4]

        def run(folder, which=which):
            (folder / "code.py").write_text("raise SystemExit(7)")
            words = ("sh", "-c", f'exec "$@" {which}', "sh", *COMMAND, "--num_gpus", "2", "--no_local_rank", "code.py")
            ran = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, timeout=120, check=False)
            assert ran.returncode == 7, f"{ran.returncode}: {ran.stderr[-300:]!r}"

        row.case(f"#{number} {which}", run)
    return row


def nodes(chance, count):
    what = "two supervisors, no restart left, one killed and come back: 2, 1, 2 ranks, the losses of an unbroken run"
    row = Row("nodes", what)
    with tempfile.TemporaryDirectory() as name:
        ran = launch(*WORDS[:5], "--steps", 2000, "--elastic", "--out", name, "--every", 1000, cwd=name)
        assert ran.returncode == 0, ran.stderr
        whole = curve(Path(name))
    for number in range(count):
        port = chance.randrange(15_000, 19_000)

        def run(folder, port=port):
            own = ("--max_restarts", 0, *elastic(port))
            rest = (TRAIN, "--out", folder, "--steps", 2000, "--pause", 0.02, "--elastic", "--every", 10)
            first, second = (start(*own, node, *rest, cwd=folder, name=f"node{node}") for node in (0, 1))
            begun, losses = folder / "starts.txt", folder / "loss-0.txt"
            wait_until(lambda: losses.exists() and "\n15 " in losses.read_text(), "step 15")
            second.signal(signal.SIGKILL)
            wait_until(lambda: len(starts(folder)) == 2, "one node alone")
            third = start(*own, 1, *rest, cwd=folder, name="again")
            wait_until(lambda: len(begun.read_text().splitlines()) == 3, "two nodes again")
            time.sleep(1)
            first.signal(signal.SIGTERM)
            third.signal(signal.SIGTERM)
            assert (first.end(), third.end()) == (75, 75), first.text[-500:] + third.text[-500:]
            assert [int(line[2]) for line in starts(folder)] == [2, 1, 2]
            assert "node 1 (node1) is lost" in first.text and "mizzen: rank" not in first.text, first.text[-500:]
            for line in losses.read_text().splitlines():
                step, loss = int(line.split()[0]), float.fromhex(line.split()[1])
                expected = float.fromhex(whole[step])
                assert abs(loss - expected) <= 1e-4 * abs(expected) + 1e-7, f"step {step}: {loss} for {expected}"

        row.case(f"#{number} port {port}", run)
    return row


LINE = "import os, time\nif os.environ['RANK'] == '0':\n    print(time.time())\n"


def start_cost(count):
    """Seconds from the command to the first line of a script, ours and torchrun's, one after the other."""
    rows = [Row("start", "mizzen run, to the first line of the script"), Row("start", "torchrun, the same")]
    ours = (sys.executable, "-m", "mizzen.cli", "run", "--num_gpus", "2", "--no_local_rank")
    theirs = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "line.py").write_text(LINE)
        for _ in range(count):
            for row, command in zip(rows, (ours, theirs), strict=True):
                began = time.time()
                ran = subprocess.run(
                    [*command, "line.py"], cwd=name, env=environment(), capture_output=True, text=True, check=True
                )
                row.runs += 1
                row.seconds.append(float(ran.stdout.split()[0]) - began)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=10.0 if os.environ.get("FULL") else 1.0, help="times the counts")
    parser.add_argument("--only", default="", help="rows, by commas: R1,R7")
    given = parser.parse_args()
    chance, only = random.Random(given.seed), set(filter(None, given.only.split(",")))

    def times(count):
        return max(1, round(count * given.scale))

    curves = {}

    def whole(stage):
        if stage not in curves:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                ran = launch(*WORDS, "--out", folder, "--stage", stage, cwd=folder)
                assert ran.returncode == 0, ran.stderr
                curves[stage] = curve(folder)
        return curves[stage]

    table = {
        "R1": lambda: [killed(chance, times(50), whole)],
        "R7": lambda: [preempted(chance, times(40))],
        "R8": lambda: [hung(chance, times(20))],
        "R13": lambda: [ports(times(100))],
        "R14": lambda: [orphans(chance, times(60))],
        "nodes": lambda: [nodes(chance, times(5))],
        "rejoin": lambda: [rejoined(chance, times(10))],
        "strangers": lambda: [visited(chance, times(10), whole)],
        "streams": lambda: [closed(times(20))],
        "start": lambda: start_cost(times(10)),
    }
    print(f"seed {given.seed}, scale {given.scale:g}, {os.cpu_count()} cores\n")
    print("| row | what | runs | failures | time |\n|---|---|--:|--:|---|", flush=True)
    failures = 0
    for name, make in table.items():
        if not only or name in only:
            for row in make():
                failures += len(row.close().failures)
                print(row, flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
