"""Messages between supervisors that nobody else can write or repeat. What is in them can be read on the way.

[Note: who may speak]
Both ends prove that they know the job's secret, over numbers that each has just made up. Who connects proves it first,
so that the first node does nothing for others but wait a little and hang up. Every message then carries a proof, under
a key of this one connection and this one direction, over its number and its text. So a message cannot be forged,
changed, left out, repeated, or used in another job. The text is JSON, and is read after its proof. Nothing here is ever
unpickled.
"""

import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from mizzen.errors import LaunchError
from mizzen.network import PROOF, is_proof, prove

GREETING: Final = b"mizzen 1\n"
NONCE: Final = 32
HEAD: Final = struct.Struct(">I")
LARGEST: Final = 1 << 26
"""Bytes of one message: the stacks of all ranks of a node are the longest."""
HANDSHAKE: Final = 20.0
"""Seconds that a connection has to prove who it is."""
MOST_UNPROVED: Final = 128
"""Connections that have yet to prove it; the oldest makes room for one more."""
TICK: Final = 0.1
PAUSE: Final = 0.2
"""Seconds between two attempts to reach a node that is not there yet."""


class Refused(LaunchError):
    """Who is at the other end does not know the secret of this job, or does not know us."""


class MessageSigner:
    """One direction of a connection: every message carries a proof over its number and its text."""

    def __init__(self, secret: bytes, direction: bytes, nonces: bytes) -> None:
        self._key, self._count = prove(secret, b"messages", direction, nonces), 0

    def wrap(self, message: Any) -> bytes:
        """A message as it travels."""
        text = json.dumps(message, separators=(",", ":")).encode()
        proof = prove(self._key, self._number(), text)
        self._count += 1
        return HEAD.pack(len(text)) + proof + text

    def unwrap(self, proof: bytes, text: bytes) -> Any:
        """What a message says, once it is known whose it is."""
        if not is_proof(proof, self._key, self._number(), text):
            raise Refused("a message was changed on its way, or somebody else has written it")
        self._count += 1
        return json.loads(text)

    def _number(self) -> bytes:
        return self._count.to_bytes(8, "big")


class Channel:
    """A supervisor's connection to the first node. One thread uses it."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._receive(len(GREETING)) != GREETING:
            raise Refused("something else than a job of this version of mizzen listens there")
        theirs, ours = self._receive(NONCE), os.urandom(NONCE)
        nonces = theirs + ours
        connection.sendall(GREETING + ours + prove(secret, b"peer", nonces))
        try:
            answer = self._receive(PROOF)
        except ConnectionError:
            raise Refused("the node there does not know the secret of this job") from None
        if not is_proof(answer, secret, b"host", nonces):
            raise Refused("what listens there does not know the secret of this job")
        self._out = MessageSigner(secret, b"to the host", nonces)
        self._in = MessageSigner(secret, b"from the host", nonces)

    def ask(self, *message: Any) -> Any:
        """Send a message and wait for its answer; OSError when the other end is gone."""
        self._socket.sendall(self._out.wrap(message))
        (size,) = HEAD.unpack(self._receive(HEAD.size))
        if size > LARGEST:
            raise Refused(f"a message of {size:,} bytes")
        return self._in.unwrap(self._receive(PROOF), self._receive(size))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _receive(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            if not (more := self._socket.recv(count - len(found))):
                raise ConnectionResetError("the other end has hung up")
            found += more
        return bytes(found)


def connect(
    host: tuple[str, int], secret: bytes, *, wait: float, silence: float, is_over: Callable[[], bool] = lambda: False
) -> Channel:
    """Reach the first node, which may not be there yet; no answer of it may take longer than `silence`."""
    until, failed, (address, port) = time.monotonic() + wait, "", host
    while time.monotonic() < until and not is_over():
        connection = None
        try:
            connection = socket.create_connection(host, timeout=min(silence, wait))
            return Channel(connection, secret)
        except (OSError, UnicodeError) as error:
            failed = str(error)
        except Refused as error:
            _close(connection)
            raise Refused(
                f"the first node of this job is expected at {address}:{port}, but {error}. Nodes that are started one "
                "by one need the same MIZZEN_SECRET, or the same file .mizzen_secret in their home folders"
            ) from None
        _close(connection)
        time.sleep(PAUSE)
    raise LaunchError(
        f"the first node was waited for at {address}:{port} for {wait:.0f} s and has not answered ({failed}): see "
        "whether it runs, whether the address is right, and whether a firewall closes the port"
    )


def _close(connection: socket.socket | None) -> None:
    if connection is not None:
        connection.close()


@dataclass(slots=True, eq=False)
class Peer:
    """One connection, as the first node sees it."""

    connection: socket.socket
    nonce: bytes
    since: float
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)
    signers: tuple[MessageSigner, MessageSigner] | None = None
    """What it sends and what it is sent, once it has proved that it knows the secret."""


class ChannelServer:
    """The first node's side: a thread that lets those in who know the secret, and answers them one message at a time.

    `answer` is called with a peer and its message, `gone` with a peer that has hung up, `tick` every now and then.
    All three run in that thread, and none of them may wait.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        *,
        answer: Callable[[Peer, list[Any]], Any],
        gone: Callable[[Peer], None],
        tick: Callable[[], None],
    ) -> None:
        self._listener, self._secret = listener, secret
        self._answer, self._gone, self._tick = answer, gone, tick
        self._selector = selectors.DefaultSelector()
        self._unproved: dict[Peer, None] = {}
        self._is_closed = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="mizzen-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more, and free the port."""
        self._is_closed = True
        self._thread.join(5 * TICK + 1.0)

    def _run(self) -> None:
        while not self._is_closed:
            for key, events in self._selector.select(TICK):
                if key.data is None:
                    self._accept()
                elif key.data.connection.fileno() >= 0:
                    self._handle(key.data, events)
            late = time.monotonic() - HANDSHAKE
            for peer in [peer for peer in self._unproved if peer.since < late]:
                self._disconnect(peer)
            self._tick()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            time.sleep(TICK)  # no descriptor is left; a connection that gives up, or is dropped, frees one
            return
        while len(self._unproved) >= MOST_UNPROVED:
            self._disconnect(next(iter(self._unproved)))
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = Peer(connection, os.urandom(NONCE), time.monotonic())
        self._unproved[peer] = None
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._send(peer, GREETING + peer.nonce)

    def _disconnect(self, peer: Peer) -> None:
        if peer.connection.fileno() < 0:
            return
        self._unproved.pop(peer, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.signers is not None:
            self._gone(peer)

    def _handle(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(peer, b"")
            if events & selectors.EVENT_READ:
                more = peer.connection.recv(1 << 16)
                if not more:
                    self._disconnect(peer)
                    return
                peer.received += more
                self._read(peer)
        except BlockingIOError:
            return
        except (OSError, Refused, ValueError, TypeError, LookupError):
            self._disconnect(peer)

    def _read(self, peer: Peer) -> None:
        if peer.signers is None:
            self._authenticate(peer)
        while peer.signers is not None and peer.connection.fileno() >= 0 and len(peer.received) >= HEAD.size + PROOF:
            (size,) = HEAD.unpack_from(peer.received)
            if size > LARGEST:
                raise Refused(f"a message of {size:,} bytes")
            end = HEAD.size + PROOF + size
            if len(peer.received) < end:
                return
            proof, text = peer.received[HEAD.size : HEAD.size + PROOF], peer.received[HEAD.size + PROOF : end]
            del peer.received[:end]
            theirs, ours = peer.signers
            message = theirs.unwrap(bytes(proof), bytes(text))
            self._send(peer, ours.wrap(self._answer(peer, message)))

    def _authenticate(self, peer: Peer) -> None:
        """Take the greeting of a peer, once it is there; others are dropped at the first wrong byte."""
        length = len(GREETING)
        start = bytes(peer.received[:length])
        if not GREETING.startswith(start):
            raise Refused("this is no greeting")
        if len(peer.received) < length + NONCE + PROOF:
            return
        nonces = peer.nonce + bytes(peer.received[length : length + NONCE])
        proof = bytes(peer.received[length + NONCE : length + NONCE + PROOF])
        del peer.received[: length + NONCE + PROOF]
        if not is_proof(proof, self._secret, b"peer", nonces):
            raise Refused("this is no peer of ours")
        peer.signers = (
            MessageSigner(self._secret, b"to the host", nonces),
            MessageSigner(self._secret, b"from the host", nonces),
        )
        del self._unproved[peer]
        self._send(peer, prove(self._secret, b"host", nonces))

    def _send(self, peer: Peer, data: bytes) -> None:
        """Send what can be sent now, and the rest when there is room."""
        peer.to_send += data
        try:
            while peer.to_send:
                del peer.to_send[: peer.connection.send(peer.to_send)]
        except BlockingIOError:
            pass
        except OSError:
            self._disconnect(peer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.to_send else 0)
        self._selector.modify(peer.connection, wanted, peer)
