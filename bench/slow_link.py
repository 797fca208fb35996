"""ZeRO++ against plain stage 3 over a slow link: two nodes that are network namespaces, joined by a shaped veth pair.

    python -m bench.slow_link                 # as root; 2 nodes of 2 ranks, 1 Gbit/s and 2 ms each way
    python -m bench.slow_link --inside 1      # one rank in each, so without hpZ and a second hop

It makes two namespaces and a pair of devices, named after the number of this process, and takes them away again.
Nothing else on the machine is changed. It needs root and the commands `ip` and `tc` (`apt-get install iproute2`), and
otherwise says so and measures nothing. The delay needs the kernel's netem; where it is not compiled in, the rate alone
is shaped, by tbf, and the output says what the kernel has said.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.paired import ratio, typical
from bench.record import table
from bench.slow_rank import SYSTEMS
from mizzen.environment import environ

ROOT: Final = Path(__file__).parents[1]
ADDRESSES: Final = ("10.213.77.1", "10.213.77.2")
PORT: Final = 29400
PATIENCE: Final = 900


@dataclass(frozen=True, slots=True)
class Link:
    """The wire between two nodes."""

    rate: str
    """As `tc` has it."""
    delay: str
    nodes: tuple[str, str]
    devices: tuple[str, str]

    def made_by(self) -> list[list[str]]:
        """The commands that make it, without a shape."""
        (one, other), (left, right) = self.nodes, self.devices
        words = [["ip", "netns", "add", node] for node in self.nodes]
        words.append(["ip", "link", "add", left, "netns", one, "type", "veth", "peer", "name", right, "netns", other])
        for node, device, address in zip(self.nodes, self.devices, ADDRESSES, strict=True):
            words.append(["ip", "-n", node, "addr", "add", f"{address}/24", "dev", device])
            words += [["ip", "-n", node, "link", "set", name, "up"] for name in ("lo", device)]
        return words

    def shaped_by(self, node: int, *, with_delay: bool) -> list[str]:
        """The command that shapes what leaves a node."""
        start = ["ip", "netns", "exec", self.nodes[node], "tc", "qdisc", "add", "dev", self.devices[node], "root"]
        if with_delay:
            return [*start, "netem", "rate", self.rate, "delay", self.delay, "limit", "100000"]
        return [*start, "tbf", "rate", self.rate, "burst", "256kb", "latency", "400ms"]

    def removed_by(self) -> list[list[str]]:
        """The devices go with their namespaces."""
        return [["ip", "netns", "del", node] for node in self.nodes]


def reason_not_to(user: int, found: Mapping[str, str | None]) -> str | None:
    """Why nothing can be measured here, or None."""
    if user != 0:
        return f"skipped: network namespaces are made by root, and this is user {user}"
    missing = [name for name, path in found.items() if path is None]
    return f"skipped: no command {' and '.join(missing)} here; apt-get install iproute2" if missing else None


@contextmanager
def linked(link: Link) -> Iterator[str]:
    """Two nodes for as long as it lasts; yields what the wire is like."""
    try:
        for words in link.made_by():
            subprocess.run(words, check=True, capture_output=True, text=True)
        yield _shape(link)
    finally:
        for words in link.removed_by():
            subprocess.run(words, check=False, capture_output=True)


def _shape(link: Link) -> str:
    tried = subprocess.run(link.shaped_by(0, with_delay=True), check=False, capture_output=True, text=True)
    if tried.returncode == 0:
        subprocess.run(link.shaped_by(1, with_delay=True), check=True, capture_output=True)
        return f"{link.rate} and {link.delay} each way, by netem"
    for node in range(2):
        subprocess.run(link.shaped_by(node, with_delay=False), check=True, capture_output=True)
    said = " ".join(tried.stderr.split())
    return f"{link.rate} each way by tbf, without a delay: this kernel has no netem ('{said}')"


def run(link: Link, options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of both nodes; what rank 0 has to say."""
    processes = []
    for rank in range(2 * options.inside):
        node = rank // options.inside
        environment = {
            **environ(),
            "RANK": str(rank),
            "WORLD_SIZE": str(2 * options.inside),
            "LOCAL_RANK": str(rank % options.inside),
            "LOCAL_WORLD_SIZE": str(options.inside),
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": link.devices[node],
            "OMP_NUM_THREADS": "1",
        }
        words = ["ip", "netns", "exec", link.nodes[node], sys.executable, "-m", "bench.slow_rank"]
        words += [link.devices[node], json.dumps({key: vars(options)[key] for key in ("rounds", "width", "layers")})]
        words += ["--inside", str(options.inside), "--systems", *options.systems]
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=out, text=True))
    try:
        text, _ = processes[0].communicate(timeout=PATIENCE)
        codes = [process.wait(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
    found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return found


def report(found: Mapping[str, Any]) -> str:
    """One row for each system, against the first."""
    base = found[next(iter(found))]
    rows = [
        (
            name,
            f"{1000 * typical(each['turns']):.0f}",
            str(ratio(each["turns"], base["turns"])) if each is not base else "1",
            f"{each['bytes'] / 1e6:.2f}",
            f"{base['bytes'] / each['bytes']:.2f}",
            f"{each['loss']:.4f}",
        )
        for name, each in found.items()
    ]
    heads = ["system", "ms/step", "time, where the first is 1", "MB/step out of a node", "times fewer", "last loss"]
    return table(heads, rows)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, or say why not."""
    parser = argparse.ArgumentParser(prog="bench.slow_link", description="ZeRO++ against stage 3 over a slow link")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--delay", default="2ms")
    parser.add_argument("--inside", type=int, default=2, help="ranks of a node (default: 2)")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    options = parser.parse_args(words)
    reason = reason_not_to(os.geteuid(), {name: shutil.which(name) for name in ("ip", "tc")})
    if reason is not None:
        print(reason)
        return 0
    number = os.getpid()
    nodes, devices = (f"mizzen-{number}-a", f"mizzen-{number}-b"), (f"mz{number}a", f"mz{number}b")
    link = Link(options.rate, options.delay, nodes, devices)
    with linked(link) as shape:
        print(f"2 nodes of {options.inside} ranks, {shape}; {options.layers} layers of {options.width}, fp32\n")
        print(report(run(link, options)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
