"""The bench over a slow link: what it would do to a machine, when it does nothing, and what it prints."""

import pytest
from bench import slow_link
from bench.slow_link import Link, main, reason_not_to, report
from bench.slow_rank import SYSTEMS, sent

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
    made = [words[-1] for words in LINK.made_by() if words[1:3] == ["netns", "add"]]
    assert made == [words[-1] for words in LINK.removed_by()] == ["one", "two"]
    with_delay, without = (" ".join(LINK.shaped_by(1, with_delay=flag)) for flag in (True, False))
    assert with_delay.startswith("ip netns exec two tc qdisc add dev right root netem rate 1gbit delay 2ms")
    assert "tbf rate 1gbit" in without and "2ms" not in without


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
