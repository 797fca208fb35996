"""A store of torch that is hosted here for the ranks of one attempt, and how a port is had. torch is loaded on use."""

import os
import socket
import threading
from typing import Any, Final

from mizzen.errors import LaunchError
from mizzen.network import listen

LOOPBACK: Final = "127.0.0.1"


class PortTaken(LaunchError):
    """The meeting port belongs to somebody else."""


def bind(name: str, port: int) -> socket.socket:
    """A socket that listens at the address that others call `name`."""
    try:
        return listen(name, port)
    except OSError as error:
        raise PortTaken(
            f"port {port} of this machine cannot be had ({error.strerror}), most likely because another job has "
            "it: leave --master_port out and a free one is found, or name another"
        ) from error


class StoreHost:
    """A store for the ranks of one attempt. Its port is bound at once; torch answers there as soon as it is loaded."""

    def __init__(self, address: str, port: int = 0) -> None:
        self._socket = bind(address, port)
        self.port: int = self._socket.getsockname()[1]
        self.address = address
        self.store: Any = None
        self._lock = threading.Lock()
        self._is_closed = False

    def serve(self) -> None:
        """Load torch and answer."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with self._lock:
            if self._is_closed:
                return
            self.store = TCPStore(
                self.address,
                self.port,
                None,
                True,
                wait_for_workers=False,
                master_listen_fd=os.dup(self._socket.fileno()),
            )

    def serve_soon(self) -> None:
        """Serve in a thread: loading torch takes as long as the ranks take to need the store."""
        threading.Thread(target=self.serve, name="mizzen-store", daemon=True).start()

    def close(self) -> None:
        """Free the port."""
        with self._lock:
            self._is_closed = True
            self._socket.close()
            self.store = None
