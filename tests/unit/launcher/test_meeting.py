"""Ports that are bound before they are told, and what a node knows of its network."""

import socket

import pytest

from mizzen.errors import LaunchError
from mizzen.launcher.hosts import Host
from mizzen.launcher.job import Job, Program
from mizzen.launcher.meeting import Alone, PortTaken, Seat, StoreHost, address_towards, interface_of, meet


def job(**changes):
    values = {"id": "a", "program": Program("script", "t.py"), "hosts": (Host("localhost", (0, 1)),), "folder": "/"}
    return Job(**{**values, "python": "py", **changes})


def test_a_port_is_ours_from_the_start():
    host = StoreHost("127.0.0.1")
    with socket.create_connection(("127.0.0.1", host.port), timeout=5):
        pass
    with pytest.raises(PortTaken, match=f"port {host.port} of this machine cannot be had"):
        StoreHost("127.0.0.1", host.port)
    host.close()
    StoreHost("127.0.0.1", host.port).close()


def test_a_store_answers_those_who_came_before_it():
    from torch.distributed import TCPStore

    host = StoreHost("127.0.0.1")
    host.serve_soon()
    store = TCPStore("127.0.0.1", host.port, None, False)
    store.set("a", "b")
    assert store.get("a") == b"b"
    host.close()


def test_one_node_meets_itself_at_a_new_port_each_time():
    meeting = meet(job(), Seat(0, job().hosts[0], ""), {})
    assert isinstance(meeting, Alone)
    first, second = meeting.join(), meeting.join()
    assert (first.world, first.first_rank, first.attempt, second.attempt) == (2, 0, 0, 1)
    assert first.master_port != second.master_port
    assert meeting.news().are_finished and meeting.share("k", "v") == ["v"]
    meeting.leave("")


def test_the_way_to_a_host():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
    with pytest.raises(LaunchError, match="cannot be reached from this machine"):
        address_towards("no such host")
