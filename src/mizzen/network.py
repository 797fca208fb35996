"""Where a socket of ours listens, and proof that what comes over one was written by our own job. No torch.

docs/security.md says which ports there are and what is assumed of the network.
"""

import hmac
import ipaddress
import os
import socket
from contextlib import suppress
from typing import Final

import psutil

PROOF: Final = 32
"""Bytes of a proof."""
WAITING: Final = 2048
"""Connections that may wait for somebody to answer them."""
EVERYWHERE: Final = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}

Address = tuple[socket.AddressFamily, str]


def resolve(name: str) -> list[Address]:
    """The addresses of a host, none where the name has none. A name with an empty or overlong part is no name."""
    try:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [(row[0], str(row[4][0])) for row in rows if row[0] in EVERYWHERE]


def is_loopback(address: str) -> bool:
    """Whether an address never leaves the host."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listening_address(name: str) -> Address:
    """Where the host that others call `name` listens: at that address alone, where this machine has it.

    A name that is not an address and leads this machine to itself (127.0.1.1 in Debian's /etc/hosts) leads others to
    an address that it does not know, and so does one that is translated on the way: then it listens everywhere.
    """
    own = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    is_meant = name == "localhost" or is_address(name)
    found = resolve(name)
    for family, address in found:
        if is_meant if is_loopback(address) else address.partition("%")[0] in own:
            return family, address
    family = found[0][0] if found else socket.AF_INET
    return family, EVERYWHERE[family]


def is_address(name: str) -> bool:
    """Whether a name is written as an address."""
    with suppress(ValueError):
        ipaddress.ip_address(name.partition("%")[0])
        return True
    return False


def listen(name: str, port: int = 0) -> socket.socket:
    """A socket that listens where `listening_address` says; OSError where the port is taken."""
    family, address = listening_address(name)
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(WAITING)
    except OSError:
        listener.close()
        raise
    return listener


def prove(key: bytes, *parts: bytes) -> bytes:
    """What only a holder of the key can say about these parts, in this order."""
    whole = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(key, whole, "sha256")


def is_proof(proof: bytes, key: bytes, *parts: bytes) -> bool:
    """Whether somebody who holds the key has said it."""
    return hmac.compare_digest(proof, prove(key, *parts))


def fresh_key() -> str:
    """A secret that nobody can guess, as text."""
    return os.urandom(32).hex()
