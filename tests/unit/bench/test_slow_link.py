"""The bench over a slow link: what it would do to a machine, when it does nothing, and what it prints."""

import socket
import time

import pytest
from bench import slow_link
from bench.slow_link import Link, main, reason_not_to, report
from bench.slow_rank import SYSTEMS, sent
from bench.wire import Direction

LINK = Link("1gbit", "2ms", ("one", "two"), ("left", "right"))


def test_it_says_why_it_measures_nothing():
    assert "made by root, and this is user 1000" in reason_not_to(1000, {"ip": "/sbin/ip", "tc": "/sbin/tc"})
    assert "no command tc here; apt-get install iproute2" in reason_not_to(0, {"ip": "/sbin/ip", "tc": None})
    assert reason_not_to(0, {"ip": "/sbin/ip", "tc": "/sbin/tc"}) is None


def test_without_root_nothing_happens(monkeypatch, capsys):
    monkeypatch.setattr(slow_link.os, "geteuid", lambda: 1000)
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("skipped: network namespaces are made by root")


def test_what_is_made_is_taken_away():
    assert [words[-1] for words in LINK.removed_by()] == ["one", "two"]
    pair, *shapes = (" ".join(words) for words in LINK.joined_by())
    assert pair == "ip link add left netns one type veth peer name right netns two"
    assert shapes[1].startswith("ip netns exec two tc qdisc add dev right root netem rate 1gbit delay 2ms")


def test_a_wire_in_user_space_gets_the_same_numbers():
    assert LINK.carried_by()[2:] == ["bench.wire", "one", "left", "two", "right", "1000000000.0", "0.002"]
    with pytest.raises(SystemExit, match="'2 miles' is no number with one of the units us, ms, s"):
        Link("1gbit", "2 miles", ("one", "two"), ("left", "right")).carried_by()


def test_packets_go_over_it_in_turn_and_late():
    """100 bytes at 8,000 bits per second take 0.1 s each, and then the delay."""
    ends = [socket.socketpair(type=socket.SOCK_DGRAM) for _ in range(2)]
    (sender, source), (target, receiver) = ends
    source.setblocking(False)
    way = Direction(source.fileno(), target.fileno(), rate=8000.0, delay=0.05)
    began = time.monotonic()
    for number in range(3):
        sender.send(bytes([number]) * 100)
    way.take()
    assert [round(due - way.packets[0][0], 3) for due, _ in way.packets] == [0, 0.1, 0.2]
    assert way.packets[0][0] - began >= 0.15
    while (early := way.give()) is not None:
        time.sleep(early)
    assert time.monotonic() - began >= 0.35
    assert [receiver.recv(200)[0] for _ in range(3)] == [0, 1, 2]
    assert way.waiting == 0
    for end in (*ends[0], *ends[1]):
        end.close()


def test_the_table_has_ratios_and_bytes():
    found = {
        "stage 3": {"turns": [[1.0], [1.2]], "bytes": 8e6, "loss": 2.0},
        "ZeRO++": {"turns": [[0.5], [0.6]], "bytes": 1e6, "loss": 2.1},
    }
    row = report(found).splitlines()[-1]
    assert [cell.strip() for cell in row.strip("|").split("|")][:2] == ["ZeRO++", "550"]
    assert "0.500 (0.500 - 0.500)" in row and "8.00" in row


def test_the_kernels_count_of_bytes():
    assert sent("lo") >= 0
    with pytest.raises(RuntimeError, match="no device nothing"):
        sent("nothing")


def test_the_first_system_is_the_plain_one():
    assert next(iter(SYSTEMS.items())) == ("stage 3", {})
