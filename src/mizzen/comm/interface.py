"""Which network interface the ranks should talk over, and whether they will. Reads addresses; sends nothing.

[Note: why this only warns]
gloo and NCCL take the interface from GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in the C environment and from nowhere
else. `ProcessGroupGloo._Options` has a list of devices, but `init_process_group` and `new_group` build gloo without it:
a group given a device on `lo` while GLOO_SOCKET_IFNAME=eth0 listened on eth0, on torch 2.11 and on 2.13. A backend of
our own that passes the device is no longer called "gloo" and loses what torch does for that name (monitored_barrier,
DeviceMesh, sequence numbers). This library writes no environment variable, so a launcher has to set them for the ranks;
here a rank finds out what they ought to be, and says so where the default would not work.

[Note: what gloo does by itself]
It binds to the address of this host's own name, and to loopback if that fails. Many hosts resolve their own name to
127.0.0.1 or 127.0.1.1 (Debian writes it into /etc/hosts), and then ranks on other hosts cannot connect.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import psutil

from mizzen.environment import Switches
from mizzen.network import is_loopback, resolve

DISCARD: Final = 9
"""A port to name in a connect that sends nothing."""
VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of this host, one of its addresses, and why it was chosen."""

    name: str
    address: str
    reason: str

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        return is_loopback(self.address)


def choose_interface(target: str | None, env: Mapping[str, str]) -> Interface | None:
    """The interface to talk over: the one that the user names, else the one that leads to `target`, else any."""
    named = ((variable, env.get(variable)) for variable in (*VARIABLES, "MIZZEN_INTERFACE"))
    for variable, value in named:
        if value and (found := _matching(value)):
            return Interface(*found, f"{variable}={value}")
    if target is not None and (source := address_towards(target)):
        return Interface(_holder(source) or "lo", source, f"it leads to {target}")
    for name, address in _addresses():
        if not is_loopback(address):
            return Interface(name, address, "it is the first that is not loopback")
    return None


def default_interface(env: Mapping[str, str]) -> Interface:
    """The interface that gloo will use in this process, whatever we think of it."""
    wanted = env.get("GLOO_SOCKET_IFNAME")
    if wanted and (found := _matching(wanted)):
        return Interface(*found, f"GLOO_SOCKET_IFNAME={wanted}")
    own = socket.gethostname()
    for address in _resolve(own):
        if holder := _holder(address):
            return Interface(holder, address, f"the host's own name, {own}, resolves to it")
    return Interface("lo", "127.0.0.1", f"the host's own name, {own}, resolves to no address of this host")


def interface_problem(target: str | None, env: Mapping[str, str]) -> str | None:
    """What is wrong with the interface of a rank whose job spans several hosts, and the way out; None if nothing is."""
    asked, used = Switches.read(env).interface, default_interface(env)
    known = {name for name, _ in _addresses()}
    if asked and not _matching(asked):
        return f"MIZZEN_INTERFACE={asked}: this host has only {', '.join(sorted(known))}"
    if asked and used.name != asked:
        return (
            f"MIZZEN_INTERFACE={asked}, but gloo will use {used.name} ({used.reason}): start with `mizzen run`, which "
            f"passes the choice on, or set {' and '.join(VARIABLES)} to {asked} for every rank"
        )
    # On the master's own host its name often leads to loopback, which says nothing about the way to the others.
    better = choose_interface(None if target is None or is_here(target) else target, env)
    if used.is_loopback and better is not None and not better.is_loopback:
        return (
            f"this job spans several hosts, but gloo will use {used.name} at {used.address} ({used.reason}), which "
            f"other hosts cannot reach: start with `mizzen run`, or set {' and '.join(VARIABLES)} to {better.name} for "
            "every rank"
        )
    return None


def address_towards(target: str) -> str | None:
    """The address of this host from which packets to `target` would leave; None if there is no way to it."""
    for family, address in resolve(target):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, DISCARD))  # a datagram socket only looks up the route
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def is_here(host: str) -> bool:
    """Whether a host name or address is this host."""
    return any(is_loopback(address) or _holder(address) for address in _resolve(host))


def _addresses() -> list[tuple[str, str]]:
    """Name and address of every interface that is up, IPv4 before IPv6."""
    states = psutil.net_if_stats()
    rows = [
        (family, name, entry.address.partition("%")[0])
        for name, entries in psutil.net_if_addrs().items()
        if name not in states or states[name].isup
        for entry in entries
        if (family := entry.family) in (socket.AF_INET, socket.AF_INET6)
    ]
    rows.sort(key=lambda row: row[0] != socket.AF_INET)
    return [(name, address) for _, name, address in rows]


def _matching(wanted: str) -> tuple[str, str] | None:
    """The first interface that a variable names. NCCL reads `eth` as a prefix, `=eth0` exactly, `^docker` as a not."""
    excluded, rest = wanted.startswith("^"), wanted.removeprefix("^")
    exact = rest.startswith("=")
    names = [name.strip().partition(":")[0] for name in rest.removeprefix("=").split(",")]

    def fits(name: str) -> bool:
        return name in names or (not exact and name.startswith(tuple(names)))

    rows = sorted(_addresses(), key=lambda row: row[0] not in names)
    return next((row for row in rows if fits(row[0]) != excluded), None)


def _holder(address: str) -> str | None:
    """The interface that has an address. All of 127/8 is loopback's, though only 127.0.0.1 is listed."""
    rows = _addresses()
    listed = next((name for name, own in rows if own == address.partition("%")[0]), None)
    if listed is None and is_loopback(address):
        return next((name for name, own in rows if is_loopback(own)), None)
    return listed


def _resolve(host: str) -> list[str]:
    return [address for _, address in resolve(host)]
