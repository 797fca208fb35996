"""Ports that are bound before they are told, and what a node knows of its network."""

import base64
import os
import pickle
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

from mizzen.errors import LaunchError
from mizzen.launcher import rendezvous
from mizzen.launcher.hosts import Host
from mizzen.launcher.job import Job, Program
from mizzen.launcher.rendezvous import (
    Node,
    PortTaken,
    SingleNodeRendezvous,
    StoreHost,
    address_towards,
    interface_of,
    open_rendezvous,
)


def job(**changes):
    values = {"id": "a", "program": Program("script", "t.py"), "hosts": (Host("localhost", (0, 1)),), "folder": "/"}
    return Job(**{**values, "python": "py", "secret": "s" * 32, **changes})


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
    alone = open_rendezvous(job(), Node(0, job().hosts[0], ""), {})
    assert isinstance(alone, SingleNodeRendezvous)
    first, second = alone.join(), alone.join()
    assert (first.world, first.first_rank, first.attempt, second.attempt) == (2, 0, 0, 1)
    assert first.master_port != second.master_port
    assert alone.status().are_finished and alone.share("k", "v") == ["v"]
    alone.leave("")


def test_the_way_to_a_host():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
    with pytest.raises(LaunchError, match="cannot be reached from this machine"):
        address_towards("no such host")


def several(count, port, *, min_nodes):
    """Nodes of one job that have yet to meet."""
    hosts = tuple(Host(f"n{index}", (0,)) for index in range(count))
    made = job(hosts=hosts, master_addr="127.0.0.1", master_port=port, min_nodes=min_nodes, max_nodes=count)
    return [open_rendezvous(made, Node(index, hosts[index], "127.0.0.1"), {}) for index in range(count)]


def test_a_node_that_comes_later_counts_the_attempts_of_all(port):
    """Ranks look for each other under that number."""
    first, second = several(2, port, min_nodes=1)
    assert first.join().attempt == 0
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(second.join)
        while not first.status().has_changed:
            time.sleep(0.05)
        assert [first.join().attempt, late.result(60).attempt] == [1, 1]
        left = pool.submit(second.leave, "")
        first.leave("")
        left.result(30)


def test_nodes_that_want_another_attempt_wait_for_none_that_is_gone(port):
    """The third of three leaves after the second attempt: the others name it."""
    with ThreadPoolExecutor(3) as pool:
        nodes = several(3, port, min_nodes=3)
        assert [assignment.first_rank for assignment in pool.map(lambda one: one.join(), nodes)] == [0, 1, 2]
        assert [assignment.attempt for assignment in pool.map(lambda one: one.join(), nodes)] == [1, 1, 1]
        nodes[2].leave("it had to")
        again = [pool.submit(one.join) for one in nodes[:2]]
        for one in again:
            with pytest.raises(LaunchError, match=r"node 2 \(n2\) has left: it had to"):
                one.result(60)
        list(pool.map(lambda one: one.leave(""), nodes[:2]))


def test_strangers_at_the_rendezvous_port(tmp_path, port):
    """One that speaks the language of torch's store, and forges what elastic would unpickle, keeps nobody away."""
    from torch.distributed import TCPStore

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "bomb"),)

    first, second = several(2, port, min_nodes=2)
    with ThreadPoolExecutor(4) as pool:
        early = pool.submit(first.join)
        forged = None
        with pytest.raises(RuntimeError):
            forged = TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=3))
        assert forged is None
        noisy = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for stranger in noisy[:10]:
            stranger.sendall(b"torch.rendezvous" + base64.b64encode(pickle.dumps(Bomb())))
        assert (second.join().world, assignment := early.result(60)) == (2, assignment)
        assert not (tmp_path / "bomb").exists()
        for listening in (port, assignment.master_port):
            socket.create_connection(("127.0.0.1", listening)).close()
            with pytest.raises(ConnectionError):  # it listens where it is meant to, and nowhere else
                socket.create_connection(("127.0.0.2", listening))
        left = pool.submit(second.leave, "")
        first.leave("")
        left.result(30)


def test_a_node_with_another_secret_is_told(port):
    first, second = several(2, port, min_nodes=1)
    other = open_rendezvous(replace(second._job, secret="other" * 8), second._node, {})
    assert first.join().world == 1
    with pytest.raises(LaunchError, match="does not know the secret of this job.*MIZZEN_SECRET"):
        other.join()
    other.leave("")
    first.leave("")


def test_two_nodes_of_one_number(monkeypatch, port):
    monkeypatch.setattr(rendezvous, "LOST", -rendezvous.REJOIN)
    first, second = several(2, port, min_nodes=1)
    twin = open_rendezvous(first._job, replace(second._node), {})
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(first.join)
        assert second.join().world == early.result(60).world == 2
        with pytest.raises(LaunchError, match="node 1 of this job is there already: give each node a --node_rank"):
            twin.join()
        twin.leave("")
        left = pool.submit(second.leave, "")
        first.leave("")
        left.result(30)
