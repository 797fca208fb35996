"""The page as one text: served with its data to come, or exported with its data inside.

No text of a run ever becomes markup. The page's own script puts it in as text; in an exported file it lies in a block
of JSON in which no tag can begin or end.
"""

import base64
import hashlib
import json
import re
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


def served(nonce: str, bundle: str) -> tuple[str, str]:
    """The page and its policy. The bundle comes from beside it; everything else is inside, under the nonce."""
    scripts = f'<script nonce="{nonce}" src="plotly.js"></script>\n<script nonce="{nonce}">{_part("page.js")}</script>'
    page = _filled(
        style=f'<style nonce="{nonce}">{_part("page.css")}</style>', charts=_unstyled(bundle), scripts=scripts
    )
    allowed = f"'nonce-{nonce}'"
    policy = POLICY.format(scripts=allowed, styles=allowed, connect="'self'")
    return page, f"{policy}; frame-ancestors 'none'"


def exported(data: Mapping[str, Any]) -> str:
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
