"""A store that is hosted here, and the way to one elsewhere. torch is loaded on use."""

import os
import socket
import threading
from datetime import timedelta
from typing import Any, Final

from mizzen.errors import LaunchError

LOOPBACK: Final = "127.0.0.1"
WAITING: Final = 2048
"""Connections that may wait until torch is loaded and answers them."""


class PortTaken(LaunchError):
    """The meeting port belongs to somebody else."""


class StoreHost:
    """A store for the ranks of one attempt. Its port is bound at once; torch answers there as soon as it is loaded."""

    def __init__(self, address: str, port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((address, port))
        except OSError as error:
            self._socket.close()
            raise PortTaken(
                f"port {port} of this machine cannot be had ({error.strerror}), most likely because another job has "
                "it: leave --master_port out and a free one is found, or name another"
            ) from error
        self._socket.listen(WAITING)
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
                self.address if self.address not in ("0.0.0.0", "::") else LOOPBACK,
                self.port,
                None,
                True,
                wait_for_workers=False,
                master_listen_fd=os.dup(self._socket.fileno()),
            )

    def serve_soon(self) -> None:
        """The same in a thread: loading torch takes as long as the ranks take to need the store."""
        threading.Thread(target=self.serve, name="mizzen-store", daemon=True).start()

    def close(self) -> None:
        """Free the port."""
        with self._lock:
            self._is_closed = True
            self._socket.close()
            self.store = None


def connect(address: str, port: int, timeout: timedelta) -> Any:
    """Reach the store of the first node, which may not be there yet."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        return TCPStore(address, port, None, False, timeout=timeout)
    except RuntimeError as error:
        raise LaunchError(
            f"the first node was waited for at {address}:{port} for {timeout.total_seconds():.0f} s and has not "
            "answered: see whether it runs, whether the address is right, and whether a firewall closes the port"
        ) from error
