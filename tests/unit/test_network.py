"""Where sockets listen, and what proves whose words are whose."""

import socket

import psutil
import pytest

from mizzen import network
from mizzen.network import is_proof, listen, listening_address, prove, resolve

IPV4, IPV6 = socket.AF_INET, socket.AF_INET6


@pytest.mark.parametrize("name", ["node1..lan", "a" * 64 + ".lan", ".", "no such host", "\udc80"])
def test_names_that_are_none(name):
    assert resolve(name) == []


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("head", (IPV4, "10.0.0.7")),
        ("10.0.0.7", (IPV4, "10.0.0.7")),
        ("head6", (IPV6, "2001:db8::7")),
        ("localhost", (IPV4, "127.0.0.1")),
        ("127.0.0.5", (IPV4, "127.0.0.5")),
        ("debian", (IPV4, "0.0.0.0")),
        ("behind-nat", (IPV4, "0.0.0.0")),
        ("other6", (IPV6, "::")),
        ("two", (IPV4, "10.0.0.7")),
        ("unknown", (IPV4, "0.0.0.0")),
    ],
)
def test_the_address_that_is_meant(monkeypatch, name, found):
    own = [("10.0.0.7", IPV4), ("127.0.0.1", IPV4), ("2001:db8::7%eth0", IPV6)]
    entries = [type("Entry", (), {"address": address, "family": family}) for address, family in own]
    names = {
        "head": [(IPV4, "10.0.0.7")],
        "head6": [(IPV6, "2001:db8::7")],
        "localhost": [(IPV4, "127.0.0.1")],
        "debian": [(IPV4, "127.0.1.1")],
        "behind-nat": [(IPV4, "203.0.113.1")],
        "other6": [(IPV6, "2001:db8::9")],
        "two": [(IPV4, "127.0.1.1"), (IPV4, "10.0.0.7")],
        "unknown": [],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": entries})
    monkeypatch.setattr(network, "resolve", lambda asked: names.get(asked, [(IPV4, asked)]))
    assert listening_address(name) == found


def test_a_socket_is_nowhere_else():
    with listen("127.0.0.1") as listener:
        with pytest.raises(ConnectionError):
            socket.create_connection(("127.0.0.2", listener.getsockname()[1]))
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", listener.getsockname()[1])


def test_a_proof_is_of_these_parts_in_this_order():
    proof = prove(b"k", b"ab", b"c")
    assert is_proof(proof, b"k", b"ab", b"c")
    for parts in ((b"a", b"bc"), (b"c", b"ab"), (b"abc",), (b"ab", b"c", b"")):
        assert not is_proof(proof, b"k", *parts)
    assert not is_proof(proof, b"j", b"ab", b"c") and not is_proof(b"", b"k", b"ab", b"c")
