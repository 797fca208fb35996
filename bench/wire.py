"""A wire in user space, for kernels without netem: two tun devices, and a loop that carries packets late and in turn.

    python -m bench.wire NODE DEVICE NODE DEVICE BITS_PER_SECOND SECONDS

Each device is made in its network namespace and lives as long as this process, which prints one line when both are
there. A packet waits until those before it have gone over the wire at its rate, and then for the delay. Packets are
large, up to 64 KiB, so that a Python loop can carry a gigabit.
"""

import ctypes
import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

TUNSETIFF: Final = 0x400454CA
IFF_TUN: Final = 0x0001
IFF_NO_PI: Final = 0x1000
CLONE_NEWNET: Final = 0x40000000
LARGEST: Final = 65536
ROOM: Final = 32 << 20
"""Bytes that may wait in one direction; what comes on top of that is lost, as it would be in a switch."""


@dataclass(slots=True)
class Direction:
    """What is on its way from one node to the other."""

    source: int
    target: int
    rate: float
    delay: float
    free: float = 0.0
    """When the last packet that was taken will have left the first end."""
    waiting: int = 0
    packets: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self) -> None:
        """Read all that a node wants to send now."""
        while True:
            try:
                packet = os.read(self.source, LARGEST)
            except BlockingIOError:
                return
            if self.waiting + len(packet) <= ROOM:
                self.waiting += len(packet)
                self.free = max(self.free, time.monotonic()) + 8 * len(packet) / self.rate
                self.packets.append((self.free + self.delay, packet))

    def give(self) -> float | None:
        """Write all that is due; seconds until the next is, or None when nothing waits."""
        while self.packets:
            due, packet = self.packets[0]
            early = due - time.monotonic()
            if early > 0:
                return early
            self.packets.popleft()
            self.waiting -= len(packet)
            with suppress(OSError):  # a device that is not up yet takes nothing
                os.write(self.target, packet)
        return None


def made_in(node: str, device: str) -> int:
    """A tun device in a network namespace, as a file."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{node}") as space:
        if libc.setns(space.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), node)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    return end


def main(words: Sequence[str]) -> None:
    """Carry packets until somebody ends this process."""
    one, left, other, right, rate, delay = words
    ends = made_in(one, left), made_in(other, right)
    print("ready", flush=True)
    ways = [Direction(source, target, float(rate), float(delay)) for source, target in (ends, ends[::-1])]
    with selectors.SelectSelector() as selector:  # whose timeout is not rounded to milliseconds
        for way in ways:
            selector.register(way.source, selectors.EVENT_READ, way)
        while True:
            waits = [wait for way in ways if (wait := way.give()) is not None]
            for key, _ in selector.select(min(waits, default=None)):
                key.data.take()


if __name__ == "__main__":
    main(sys.argv[1:])
