"""Variables that go with a job."""

from pathlib import Path

import pytest

from mizzen.errors import UsageError
from mizzen.launcher.variables import exported, file_paths, parse_file, with_interface


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
