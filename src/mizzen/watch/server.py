"""The page of `mizzen watch`: as one file with its data inside, or served on a port of this machine.

[Note: who may read]
Other users of this machine can reach the port, and so can any web page that its owner opens. The first do not know the
token in the path. The second could only guess it too, and one that makes its own name point here (DNS rebinding) is
known by the name in its Host header. Nothing is ever written: there is no request but GET.

[Note: texts are never markup]
The page's own script puts every text of a run in as text. In an exported file it lies in a block of JSON in which no
tag can begin or end.
"""

import base64
import hashlib
import json
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, Final

from mizzen.monitor.output import require
from mizzen.watch.run import Watcher

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
        page, policy = served_page(secrets.token_urlsafe(16), self.server.charts)
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


POLICY: Final = (
    "default-src 'none'; script-src {scripts}; style-src-elem {styles}; style-src-attr 'unsafe-inline'; "
    "img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
)
"""What the page may do: run these scripts, ask this server, nothing else. Charts set attributes of style themselves."""


def charts() -> str:
    """The offline bundle of plotly: the script that draws."""
    package = require("plotly", extra="watch", purpose="mizzen watch")
    return (Path(str(package.__file__)).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def served_page(nonce: str, bundle: str) -> tuple[str, str]:
    """The page and its policy. The bundle comes from beside it; everything else is inside, under the nonce."""
    scripts = f'<script nonce="{nonce}" src="plotly.js"></script>\n<script nonce="{nonce}">{_part("page.js")}</script>'
    page = _filled(
        style=f'<style nonce="{nonce}">{_part("page.css")}</style>', charts=_unstyled(bundle), scripts=scripts
    )
    allowed = f"'nonce-{nonce}'"
    policy = POLICY.format(scripts=allowed, styles=allowed, connect="'self'")
    return page, f"{policy}; frame-ancestors 'none'"


def exported_page(data: Mapping[str, Any]) -> str:
    """One file that needs nothing else, with the policy inside: only scripts and styles of these very bytes."""
    scripts, style = (charts(), _part("page.js")), _part("page.css")
    policy = POLICY.format(scripts=" ".join(map(_hash, scripts)), styles=_hash(style), connect="'none'")
    return _filled(
        policy=f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        style=f"<style>{style}</style>",
        charts=_unstyled(scripts[0]),
        data=_inert(data),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def _unstyled(bundle: str) -> str:
    """What keeps plotly from adding styles that the policy would refuse: it adds none where it finds these elements."""
    names = dict.fromkeys(re.findall(r'getElementById\("([0-9a-f]{64})"\)', bundle))
    elements = ('<template id="plotly.js-style-global" class="no-inline-styles"></template>',)
    return "".join((*elements, *(f'<template id="{name}"></template>' for name in names)))


def _inert(data: Mapping[str, Any]) -> str:
    """JSON that ends no script element and begins no comment, whatever texts are in it."""
    text = json.dumps(data, allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _part(name: str) -> str:
    return resources.files("mizzen.watch").joinpath("page", name).read_text(encoding="utf-8")


def _filled(**parts: str) -> str:
    """The page with each `<!--name-->` replaced, in one pass: what is put in is not looked at again."""
    return re.sub(r"<!--(\w+)-->", lambda found: parts.get(found[1], ""), _part("page.html"))


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
