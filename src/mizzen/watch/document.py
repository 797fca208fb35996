"""The page as one text: served with its data to come, or exported with its data inside.

No text of a run ever becomes markup. The page's own script puts it in as text; in an exported file it lies in a block of
JSON in which no tag can begin or end.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

from mizzen.monitor.require import require

POLICY: Final = (
    "default-src 'none'; script-src {scripts}; style-src-elem {styles}; style-src-attr 'unsafe-inline'; "
    "img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
)
"""What the page may do: run these scripts, ask this server, nothing else. Charts set attributes of style themselves."""


def charts() -> str:
    """The offline bundle of plotly: the script that draws."""
    package = require("plotly", extra="watch", purpose="mizzen watch")
    return (Path(str(package.__file__)).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def served(nonce: str) -> tuple[str, str]:
    """The page and its policy. Charts come from beside it; everything else is inside, under the nonce."""
    scripts = f'<script nonce="{nonce}" src="plotly.js"></script>\n<script nonce="{nonce}">{_part("page.js")}</script>'
    page = _filled(style=f'<style nonce="{nonce}">{_part("page.css")}</style>', data="", scripts=scripts, policy="")
    allowed = f"'nonce-{nonce}'"
    policy = POLICY.format(scripts=allowed, styles=allowed, connect="'self'")
    return _plotly_style(page, nonce), f"{policy}; frame-ancestors 'none'"


def exported(data: Mapping[str, Any]) -> str:
    """One file that needs nothing else, with the policy inside: only scripts and styles of these very bytes."""
    scripts, style = (charts(), _part("page.js")), _part("page.css")
    policy = POLICY.format(
        scripts=" ".join(map(_hash, scripts)), styles=f"{_hash(style)} {_hash(_PLOTLY_RULES)}", connect="'none'"
    )
    page = _filled(
        style=f"<style>{style}</style>",
        data=_inert(data),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
        policy=f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
    )
    return _plotly_style(page, None)


_PLOTLY_RULES: Final = ".js-plotly-plot .plotly .cursor-crosshair{cursor:crosshair}"


def _plotly_style(page: str, nonce: str | None) -> str:
    """What keeps plotly from making a style element of its own, which the policy would refuse."""
    mark = f' nonce="{nonce}"' if nonce else ""
    element = f'<style id="plotly.js-style-global" class="no-inline-styles"{mark}>{_PLOTLY_RULES}</style>'
    return page.replace("<!--charts-->", element)


def _inert(data: Mapping[str, Any]) -> str:
    """JSON that ends no script element and begins no comment, whatever texts are in it."""
    text = json.dumps(data, allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _part(name: str) -> str:
    return resources.files("mizzen.watch").joinpath("page", name).read_text(encoding="utf-8")


def _filled(**parts: str) -> str:
    page = _part("page.html")
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text, 1)
    return page


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
