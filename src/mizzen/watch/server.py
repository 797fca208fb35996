"""The page on a port of this machine: read-only, for whoever has its address, and for nobody else.

[Note: who may read]
Other users of this machine can reach the port, and so can any web page that its owner opens. The first do not know the
token in the path. The second could only guess it too, and one that makes its own name point here (DNS rebinding) is
known by the name in its Host header. Nothing is ever written: there is no request but GET.
"""

import json
import re
import secrets
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from mizzen.watch.document import charts, served
from mizzen.watch.watcher import Watcher

LOOPBACK: Final = "127.0.0.1"
OUR_NAMES: Final = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?", re.IGNORECASE)
"""Names by which a browser may call us; any port, since ssh may bring it here from another one."""
HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Server(ThreadingHTTPServer):
    """Serves a watcher's runs at `address`. Port 0 is one that is free."""

    daemon_threads = True

    def __init__(self, watcher: Watcher, port: int = 0) -> None:
        self.watcher = watcher
        self.charts = charts()
        self.token = secrets.token_urlsafe(24)
        super().__init__((LOOPBACK, port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """What to open in a browser; the token in it is the key."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/{self.token}/"


class Handler(BaseHTTPRequestHandler):
    """One request: `/TOKEN/` is the page, `/TOKEN/data?since=N` what has changed, `/TOKEN/plotly.js` the charts."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 60
    server_version, sys_version = "mizzen", ""

    def do_GET(self) -> None:
        """Answer, or say that there is nothing: without the token nothing is there."""
        path, _, query = self.path.partition("?")
        token, _, name = path.removeprefix("/").partition("/")
        answers: dict[str, Callable[[str], None]] = {"": self._page, "data": self._data, "plotly.js": self._charts}
        is_called_by_name = OUR_NAMES.fullmatch(self.headers.get("Host", "")) is not None
        has_token = secrets.compare_digest(token.encode(), self.server.token.encode())
        if is_called_by_name and has_token and name in answers:
            answers[name](query)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _page(self, _: str) -> None:
        page, policy = served(secrets.token_urlsafe(16), self.server.charts)
        self._send(page.encode(), "text/html; charset=utf-8", {"Content-Security-Policy": policy})

    def _charts(self, _: str) -> None:
        self._send(
            self.server.charts.encode(), "text/javascript; charset=utf-8", {"Cache-Control": "private, max-age=86400"}
        )

    def _data(self, query: str) -> None:
        since = query.removeprefix("since=")
        if not re.fullmatch("[0-9]{1,15}", since):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        changes = self.server.watcher.since(int(since))
        self._send(json.dumps(changes, allow_nan=False).encode(), "application/json")

    def _send(self, body: bytes, kind: str, more: dict[str, str] | None = None) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in {**HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a page that asks every second would fill the terminal."""
