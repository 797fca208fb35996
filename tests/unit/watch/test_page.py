import base64
import hashlib
import json
import re
import sys

import pytest

from mizzen.errors import MissingExtra
from mizzen.watch import server

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)> \u2028 & <!--data-->"


def test_an_exported_file_allows_only_its_own_bytes(monkeypatch):
    monkeypatch.setattr(server, "charts", lambda: 'var Plotly = document.getElementById("' + "a" * 64 + '")')
    page = server.exported_page({"revision": 1, "runs": [{"name": HOSTILE}]})
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    bodies = re.findall(r"<script>(.*?)</script>", page, re.S)
    hashes = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]
    assert len(hashes) == 2 and all(f"'sha256-{each}'" in policy for each in hashes)
    assert "nonce" not in page and "connect-src 'none'" in policy
    assert f'<template id="{"a" * 64}">' in page  # where the bundle would add styles of its own


def test_data_in_an_exported_file_is_inert_and_whole(monkeypatch):
    monkeypatch.setattr(server, "charts", lambda: "var Plotly")
    page = server.exported_page({"name": HOSTILE})
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1]
    assert json.loads(data) == {"name": HOSTILE}
    assert not set("<>&") & set(data)


def test_without_plotly_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MissingExtra, match=r"mizzen watch needs 'plotly'.*pip install 'mizzen\[watch\]'"):
        server.charts()
