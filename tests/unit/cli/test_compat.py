"""The drop-in without pip, and with a pip that fails; `tests/drop_in/test_install.py` installs it for real."""

import subprocess

import pytest

from mizzen.cli import compat


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    monkeypatch.setattr(compat, "PACKAGES", tmp_path)


def test_an_environment_without_pip(mizzen, monkeypatch):
    monkeypatch.setattr(compat, "find_spec", lambda name: None)
    ran = mizzen("compat", "install")
    assert ran.code == 2 and "has no pip" in ran.err and "ensurepip" in ran.err and "mizzen run --drop-in" in ran.err


def test_what_pip_says_is_passed_on(mizzen, monkeypatch):
    asked = []

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "error: externally-managed-environment\n")

    monkeypatch.setattr(compat.subprocess, "run", run)
    ran = mizzen("compat", "install")
    assert ran.code == 1 and "pip install of the drop-in" in ran.err and "externally-managed" in ran.err
    assert {"--isolated", "--no-index", "--no-deps", "--no-user"} <= set(asked[0])  # no network, no settings of others


def test_a_pip_that_installs_elsewhere_is_told_of(mizzen, monkeypatch):
    monkeypatch.setattr(compat.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, "", ""))
    ran = mizzen("compat", "install")
    assert ran.code == 1 and "but not in" in ran.err
