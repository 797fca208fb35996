"""Who knows the secret talks to the first node; strangers get nothing, and keep nobody from it."""

import contextlib
import os
import pickle
import socket
import time

import pytest

from mizzen.errors import LaunchError
from mizzen.launcher import channel
from mizzen.launcher.channel import GREETING, HEAD, NONCE, Channel, ChannelServer, MessageSigner, Refused, connect
from mizzen.network import PROOF, listen, prove

SECRET = b"s" * 32


class Host:
    """A server that gives every message back, and remembers who has gone."""

    def __init__(self):
        listener = listen("127.0.0.1")
        self.port, self.heard, self.gone = listener.getsockname()[1], [], 0
        self.server = ChannelServer(listener, SECRET, answer=self.answer, gone=self.leave, tick=lambda: None)

    def answer(self, peer, message):
        self.heard.append(message)
        return ["heard", *message]

    def leave(self, peer):
        self.gone += 1

    def call(self, secret=SECRET):
        return connect(("127.0.0.1", self.port), secret, wait=10, silence=10)

    def stranger(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)


@pytest.fixture
def host():
    made = Host()
    yield made
    made.server.close()


def hangs_up(connection):
    """Whether the other end has closed this connection, after what it still had to say."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        return True
    return True


def until(is_true):
    limit = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_messages_come_through_whole(host):
    first, second = host.call(), host.call()
    long = "é\udc80" * 300_000
    assert first.ask("a", 1, {"b": None}) == ["heard", "a", 1, {"b": None}]
    assert second.ask(long) == ["heard", long]
    assert first.ask() == ["heard"]
    first.close()
    until(lambda: host.gone == 1)
    assert second.ask("still") == ["heard", "still"]


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/mizzen-test-bomb",)


NOISE = [
    b"\0" * 1000,
    os.urandom(1 << 17),
    b"GET / HTTP/1.1\r\n\r\n",
    GREETING.swapcase(),
    GREETING + b"x" * (NONCE + PROOF),
    GREETING + b"x" * 100_000,
    pickle.dumps(Bomb()),
    # torch's store: the number that opens a conversation, then a set of elastic's own key.
    b"\x00\xce\xf7\x85\x3c\x01\x00\x00\x00" + pickle.dumps(Bomb()),
]


@pytest.mark.parametrize("noise", NOISE, ids=range(len(NOISE)))
def test_noise_is_hung_up_on(host, noise):
    with host.stranger() as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(noise)
        assert hangs_up(stranger)
    assert (host.heard, host.gone) == ([], 0)
    assert host.call().ask("a") == ["heard", "a"]


def test_those_who_say_nothing_keep_nobody_out(host, monkeypatch):
    silent = [host.stranger() for _ in range(channel.MOST_UNPROVED + 50)]
    assert host.call().ask("a") == ["heard", "a"]
    assert hangs_up(silent[0]), "the oldest makes room"
    monkeypatch.setattr(channel, "HANDSHAKE", 0.0)
    assert all(map(hangs_up, silent)), "and none may stay for long"
    assert host.heard == [["a"]]


def test_another_secret_is_refused(host):
    with pytest.raises(Refused, match="expected at 127.0.0.1:.* does not know the secret of this job"):
        host.call(b"t" * 32)
    assert host.heard == []


def test_a_host_that_does_not_know_the_secret_is_refused():
    with listen("127.0.0.1") as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as own:
            other, _ = listener.accept()
            with other:
                other.sendall(GREETING + b"n" * NONCE + b"p" * PROOF)
                with pytest.raises(Refused, match="what listens there does not know the secret"):
                    Channel(own, SECRET)
        with socket.create_connection(address) as own:
            other, _ = listener.accept()
            with other:
                other.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                with pytest.raises(Refused, match="something else than a job"):
                    Channel(own, SECRET)


def by_hand(host):
    """A connection that knows the secret, and both directions of it."""
    connection = host.stranger()
    received = b""
    while len(received) < len(GREETING) + NONCE:
        received += connection.recv(4096)
    nonces = received[len(GREETING) :] + b"n" * NONCE
    connection.sendall(GREETING + b"n" * NONCE + prove(SECRET, b"peer", nonces))
    assert len(connection.recv(PROOF, socket.MSG_WAITALL)) == PROOF
    return connection, MessageSigner(SECRET, b"to the host", nonces)


def test_a_message_cannot_be_repeated_changed_or_moved(host):
    connection, seal = by_hand(host)
    connection.sendall(one := seal.wrap(["stop"]))
    connection.recv(HEAD.size)
    connection.sendall(one)
    assert hangs_up(connection), "what was said once counts once"
    assert host.heard == [["stop"]]
    connection, seal = by_hand(host)
    connection.sendall(seal.wrap(["go on"]).replace(b"on", b"in"))
    assert hangs_up(connection)
    connection, seal = by_hand(host)
    connection.sendall(one)
    assert hangs_up(connection), "what was said on another connection counts there alone"
    connection, seal = by_hand(host)
    connection.sendall(HEAD.pack(channel.LARGEST + 1) + b"p" * PROOF)
    assert hangs_up(connection)
    assert host.heard == [["stop"]]


def test_a_host_that_never_comes_is_named():
    with listen("127.0.0.1") as listener:
        place = listener.getsockname()
    with pytest.raises(LaunchError, match=f"waited for at 127.0.0.1:{place[1]} for 0 s and has not answered"):
        connect(place, SECRET, wait=0.3, silence=1)
    with pytest.raises(LaunchError, match="has not answered"):
        connect(("no..name", 1), SECRET, wait=0.3, silence=1)
