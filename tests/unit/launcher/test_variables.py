"""Variables that go with a job, and the secret of nodes that are started one by one."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mizzen.errors import UsageError
from mizzen.launcher.job import (
    SECRET_FILE,
    common_secret,
    exported,
    file_paths,
    inherited,
    parse_file,
    with_interface,
)


def test_variables_go_along_by_prefix():
    env = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "a", "HOME": "/root", "MIZZEN_JOB": "x", "ZE_X": "1", "UCX_TLS": "tcp"}
    assert exported(env, ("ZE_",)) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "a", "ZE_X": "1", "UCX_TLS": "tcp"}


def test_a_file():
    text = "\n# comment\nA=1\n  export B = x=y z \nC=\nA='2'\n"
    assert parse_file(text, ".mizzen_env") == {"A": "'2'", "B": " x=y z ", "C": ""}


@pytest.mark.parametrize("line", ["no equals", "=x", "1A=x", "A B=x"])
def test_a_wrong_line_is_named(line):
    with pytest.raises(UsageError, match=r"\.mizzen_env, line 2: .* is not KEY=VALUE"):
        parse_file(f"A=1\n{line}\n", ".mizzen_env")


def test_where_files_lie():
    home, here = Path("/home/a"), Path("/job")
    names = [str(path) for path in file_paths({}, home, here)]
    assert names == ["/home/a/.deepspeed_env", "/job/.deepspeed_env", "/home/a/.mizzen_env", "/job/.mizzen_env"]
    assert [str(path) for path in file_paths({"DS_ENV_FILE": ".x"}, home, here)] == ["/home/a/.x", "/job/.x"]
    assert [str(path) for path in file_paths({"DS_ENV_FILE": "/etc/x"}, home, here)] == ["/etc/x"]
    assert [str(path) for path in file_paths({"DS_ENV_FILE": "~/x"}, home, here)] == ["/home/a/x"]


def test_the_interface_reaches_both_libraries_unless_they_were_told():
    assert with_interface({"MIZZEN_INTERFACE": "ib0", "NCCL_SOCKET_IFNAME": "eth0"}) == {
        "MIZZEN_INTERFACE": "ib0",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    assert with_interface({"A": "1"}) == {"A": "1"}


def test_the_stacks_of_torch_are_not_written_unless_somebody_asks():
    assert inherited({"HOME": "/h", "RANK": "3"})["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    assert inherited({"TORCH_CPP_LOG_LEVEL": "INFO"})["TORCH_CPP_LOG_LEVEL"] == "INFO"


def test_the_variable_goes_first(tmp_path):
    assert common_secret({"MIZZEN_SECRET": " a long random word "}, tmp_path) == "a long random word"
    with pytest.raises(UsageError, match="MIZZEN_SECRET holds 5 letters, and a secret of a job has at least 16"):
        common_secret({"MIZZEN_SECRET": "short"}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_made_once_for_all(tmp_path):
    """Also by nodes with one home that start at the same moment."""
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: common_secret({}, tmp_path), range(32)))
    assert len(found) == 1 and len(found.pop()) == 64
    assert [path.name for path in tmp_path.iterdir()] == [SECRET_FILE]
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600


def test_a_file_that_others_can_read_is_refused(tmp_path):
    common_secret({}, tmp_path)
    os.chmod(tmp_path / SECRET_FILE, 0o640)
    with pytest.raises(UsageError, match="others can read or write it: chmod 600 it"):
        common_secret({}, tmp_path)


def test_a_home_that_takes_no_file(tmp_path):
    with pytest.raises(UsageError, match="cannot be kept there .*set MIZZEN_SECRET to the same long random word"):
        common_secret({}, tmp_path / "nowhere")
