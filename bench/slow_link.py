"""ZeRO++ against plain stage 3 over a slow link: two nodes that are network namespaces, joined by a shaped wire.

    python -m bench.slow_link                 # as root; 2 nodes of 2 ranks, 1 Gbit/s and 2 ms each way
    python -m bench.slow_link --inside 1      # one rank in each, so without hpZ and a second hop

It makes two namespaces and two devices, named after the number of this process, and takes them away again. Nothing else
on the machine is changed. It needs root and the commands `ip` and `tc` (`apt-get install iproute2`), and otherwise says
so and measures nothing. The wire is a veth pair shaped by the kernel's netem; where that is not compiled in, it is a
loop in user space (`bench.wire`), and the output says so.
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
MTU: Final = 65000
RATES: Final = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
DELAYS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Link:
    """The wire between two nodes."""

    rate: str
    """As `tc` has it."""
    delay: str
    nodes: tuple[str, str]
    devices: tuple[str, str]

    def joined_by(self) -> list[list[str]]:
        """The commands that make a pair of devices whose sending the kernel shapes."""
        (one, other), (left, right) = self.nodes, self.devices
        pair = ["ip", "link", "add", left, "netns", one, "type", "veth", "peer", "name", right, "netns", other]
        shape = ["netem", "rate", self.rate, "delay", self.delay, "limit", "100000"]
        return [
            pair,
            *(
                ["ip", "netns", "exec", node, "tc", "qdisc", "add", "dev", device, "root", *shape]
                for node, device in zip(self.nodes, self.devices, strict=True)
            ),
        ]

    def carried_by(self) -> list[str]:
        """The command that makes such a pair in user space and carries packets for as long as it runs."""
        (one, other), (left, right) = self.nodes, self.devices
        rate, delay = in_units(self.rate, RATES), in_units(self.delay, DELAYS)
        return [sys.executable, "-m", "bench.wire", one, left, other, right, str(rate), str(delay)]

    def started_by(self, mtu: int | None) -> list[list[str]]:
        """The commands that give the devices addresses."""
        words = []
        for node, device, address in zip(self.nodes, self.devices, ADDRESSES, strict=True):
            words.append(["ip", "-n", node, "addr", "add", f"{address}/24", "dev", device])
            words += [["ip", "-n", node, "link", "set", device, "mtu", str(mtu)]] if mtu else []
            words += [["ip", "-n", node, "link", "set", name, "up"] for name in ("lo", device)]
        return words

    def removed_by(self) -> list[list[str]]:
        """The devices go with their namespaces."""
        return [["ip", "netns", "del", node] for node in self.nodes]


def reason_not_to(user: int, found: Mapping[str, str | None]) -> str | None:
    """Why nothing can be measured here, or None."""
    if user != 0:
        return f"skipped: network namespaces are made by root, and this is user {user}"
    missing = [name for name, path in found.items() if path is None]
    return f"skipped: no command {' and '.join(missing)} here; apt-get install iproute2" if missing else None


def in_units(text: str, units: Mapping[str, float]) -> float:
    """A number with its unit, as `tc` has it: 100mbit, 2ms."""
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    if not digits.replace(".", "", 1).isdigit() or text[len(digits) :] not in units:
        raise SystemExit(f"bench.slow_link: {text!r} is no number with one of the units {', '.join(units)}")
    return float(digits) * units[text[len(digits) :]]


@contextmanager
def linked(link: Link) -> Iterator[str]:
    """Two nodes for as long as it lasts; yields what the wire is like."""
    carrier = None
    try:
        for node in link.nodes:
            _do(["ip", "netns", "add", node])
        refusal = _refusal(link.nodes[0])
        if refusal is None:
            for words in link.joined_by():
                _do(words)
        else:
            carrier = subprocess.Popen(link.carried_by(), cwd=ROOT, stdout=subprocess.PIPE, text=True)
            if carrier.stdout is None or carrier.stdout.readline() != "ready\n":
                raise RuntimeError("the wire in user space did not come up")
        for words in link.started_by(None if refusal is None else MTU):
            _do(words)
        how = "netem" if refusal is None else f"a loop in user space: this kernel has no netem ('{refusal}')"
        yield f"{link.rate} and {link.delay} each way, by {how}"
    finally:
        if carrier is not None:
            carrier.kill()
        for words in link.removed_by():
            subprocess.run(words, check=False, capture_output=True)


def _do(words: Sequence[str]) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def _refusal(node: str) -> str | None:
    """What the kernel says to netem; None when it has it."""
    words = ["ip", "netns", "exec", node, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    tried = subprocess.run(words, check=False, capture_output=True, text=True)
    if tried.returncode:
        return " ".join(tried.stderr.split())
    _do([*words[:6], "del", "dev", "lo", "root"])
    return None


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
