"""Which interface is right, which one gloo will take, and the word of warning when they differ."""

import socket
from collections import namedtuple

import psutil
import pytest

from mizzen.comm import discover
from mizzen.comm.discover import (
    address_towards,
    choose_interface,
    default_interface,
    interface_problem,
    is_here,
    is_loopback,
)

Entry = namedtuple("Entry", "family address")
State = namedtuple("State", "isup")


@pytest.fixture
def host(monkeypatch):
    """A host with two networks and a bridge, whose name resolves as Debian makes it resolve."""
    addresses = {
        "lo": [Entry(socket.AF_INET, "127.0.0.1"), Entry(socket.AF_INET6, "::1")],
        "docker0": [Entry(socket.AF_INET, "172.17.0.1")],
        "eth0": [Entry(socket.AF_INET, "10.0.0.7"), Entry(socket.AF_INET6, "fe80::7%eth0")],
        "ib0": [Entry(socket.AF_INET, "192.168.9.7")],
        "eth1": [Entry(socket.AF_INET, "10.0.1.7")],
    }
    names = {"me": "127.0.1.1", "head": "10.0.0.1", "head-ib": "192.168.9.1"}
    routes = {"10.0.0.1": "10.0.0.7", "192.168.9.1": "192.168.9.7", "127.0.1.1": "127.0.0.1"}

    def resolved(name):
        return [(socket.AF_INET, names.get(name, name))] if name in names or name[0].isdigit() else []

    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: State(name != "eth1") for name in addresses})
    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    monkeypatch.setattr(discover, "resolve", resolved)
    monkeypatch.setattr(discover, "address_towards", lambda host: routes.get(next((a for _, a in resolved(host)), "")))
    return names


@pytest.mark.parametrize(
    ("target", "env", "found"),
    [
        ("head", {}, ("eth0", "10.0.0.7", "it leads to head")),
        ("head-ib", {}, ("ib0", "192.168.9.7", "it leads to head-ib")),
        ("me", {}, ("lo", "127.0.0.1", "it leads to me")),
        ("nowhere", {}, ("docker0", "172.17.0.1", "it is the first that is not loopback")),
        (None, {}, ("docker0", "172.17.0.1", "it is the first that is not loopback")),
        ("head", {"MIZZEN_INTERFACE": "ib0"}, ("ib0", "192.168.9.7", "MIZZEN_INTERFACE=ib0")),
        (
            "head",
            {"MIZZEN_INTERFACE": "eth0", "GLOO_SOCKET_IFNAME": "ib0"},
            ("ib0", "192.168.9.7", "GLOO_SOCKET_IFNAME=ib0"),
        ),
        ("head", {"NCCL_SOCKET_IFNAME": "^docker,lo"}, ("eth0", "10.0.0.7", "NCCL_SOCKET_IFNAME=^docker,lo")),
        ("head", {"NCCL_SOCKET_IFNAME": "ib"}, ("ib0", "192.168.9.7", "NCCL_SOCKET_IFNAME=ib")),
        ("head", {"NCCL_SOCKET_IFNAME": "=ib"}, ("eth0", "10.0.0.7", "it leads to head")),
        ("head", {"GLOO_SOCKET_IFNAME": "eth1"}, ("eth0", "10.0.0.7", "it leads to head")),
    ],
)
def test_the_users_word_then_the_route(host, target, env, found):
    chosen = choose_interface(target, env)
    assert (chosen.name, chosen.address, chosen.reason) == found


def test_gloo_takes_the_address_of_the_hosts_own_name(host):
    assert default_interface({}).is_loopback
    host["me"] = "10.0.0.7"
    assert default_interface({}).name == "eth0"
    host["me"] = "8.8.8.8"
    assert default_interface({}).is_loopback
    assert default_interface({"GLOO_SOCKET_IFNAME": "ib0"}).address == "192.168.9.7"


def test_loopback_in_a_job_of_several_hosts_is_a_problem_with_a_remedy(host):
    text = interface_problem("head", {})
    assert "gloo will use lo at 127.0.1.1 (the host's own name, me, resolves to it)" in text
    assert "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to eth0" in text
    # The master's own name leads to loopback on the master itself, which is where it matters most.
    assert "to docker0" in interface_problem("me", {})


def test_no_problem_where_others_can_reach_us(host):
    assert interface_problem("head", {"GLOO_SOCKET_IFNAME": "eth0"}) is None
    host["me"] = "10.0.0.7"
    assert interface_problem("head", {}) is None


def test_a_choice_that_gloo_will_not_follow_is_said(host):
    assert "MIZZEN_INTERFACE=ib0, but gloo will use lo" in interface_problem("head", {"MIZZEN_INTERFACE": "ib0"})
    both = {"MIZZEN_INTERFACE": "ib0", "GLOO_SOCKET_IFNAME": "ib0"}
    assert interface_problem("head", both) is None
    assert interface_problem("head", {"MIZZEN_INTERFACE": "ib7"}).startswith(
        "MIZZEN_INTERFACE=ib7: this host has only docker0"
    )


def test_this_host_for_real():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no-such-host.invalid") is None
    assert is_here("localhost") and not is_here("no-such-host.invalid")
    assert is_loopback("127.0.1.1") and is_loopback("::1") and not is_loopback("10.0.0.1")
    assert default_interface({}).name in psutil.net_if_addrs()
