"""`mizzen watch`: what it takes, and the forms without a browser."""

import json
import sys

import pytest


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run.jsonl"
    line = {"time": "2026-03-01T12:00:00+00:00", "step": 1, "applied": True, "loss": 2.5}
    path.write_text(json.dumps(line) + "\n")
    return path


def test_in_a_terminal(mizzen, run):
    ran = mizzen("watch", str(run), "--tui")
    assert ran.code == 0 and "2.5" in ran.out


def test_as_one_file(mizzen, run, tmp_path):
    pytest.importorskip("plotly")
    ran = mizzen("watch", str(run), "--export", str(tmp_path / "page.html"))
    assert (ran.code, ran.out) == (0, f"wrote {tmp_path / 'page.html'}\n")
    assert '"loss": 2.5' in (tmp_path / "page.html").read_text()


def test_what_is_wrong_is_said(mizzen, run, tmp_path, monkeypatch):
    assert mizzen("watch", str(tmp_path / "absent")).code == 2
    assert "ports go up to 65535" in mizzen("watch", str(run), "--port", "70000").err
    assert mizzen("watch", str(run), "--tui", "--export", "x.html").code == 2
    monkeypatch.setitem(sys.modules, "plotly", None)
    ran = mizzen("watch", str(run), "--export", str(tmp_path / "page.html"))
    assert ran.code == 1 and "pip install 'mizzen[watch]'" in ran.err
