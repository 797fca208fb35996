"""`mizzen run` and `mizzen ssh`: words and help; launching itself is in tests/ranks/launcher."""

from dataclasses import fields

import pytest

from mizzen.cli import main
from mizzen.cli.run import GROUPS, split
from mizzen.launcher.launch import LaunchOptions

OWN = {"script", "arguments"}


def test_every_flag_fills_a_field_and_every_field_has_a_flag():
    names = {name[2:].replace("-", "_") for _, flags in GROUPS for flag in flags for name in flag.names[-2:]}
    assert {field.name for field in fields(LaunchOptions)} - OWN <= names


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        (["--num_gpus", "2", "t.py", "--num_gpus", "3"], ["t.py", "--num_gpus", "3"]),
        (["-q", "--show=all", "t.py", "--", "-x"], ["t.py", "--", "-x"]),
        (["--", "-odd.py", "--help"], ["-odd.py", "--help"]),
        (["--module", "pkg.train", "-h"], ["pkg.train", "-h"]),
        ([], []),
    ],
)
def test_what_follows_the_script_is_its_own(words, rest):
    assert split(words)[1] == rest


def test_a_dry_run_starts_nothing(mizzen, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=1\n")
    ran = mizzen("run", "--hostfile", "hosts", "--master_addr", "a", "--dry-run", "t.py", "x y", "--debug")
    assert ran.code == 0, ran.err
    assert "3 ranks on 2 hosts" in ran.out and "t.py --local_rank=0 'x y' --debug" in ran.out


def test_a_hostfile_that_is_not_there_means_this_machine_with_a_warning(capfd):
    assert main(["run", "--hostfile", "no/such", "--num_gpus", "1", "--dry-run", "t.py"]) == 0
    out, err = capfd.readouterr()
    assert "\n  localhost: rank 0" in out
    assert err == "mizzen: warning: --hostfile no/such: there is no such file; going on without one\n"


def test_a_file_of_variables_that_is_named_must_be_there(mizzen, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv("DS_ENV_FILE", "my_env")
    ran = mizzen("run", "--num_gpus", 1, "--dry-run", "t.py")
    assert ran.code == 2 and f"DS_ENV_FILE=my_env: there is no file /nowhere/my_env or {tmp_path}/my_env" in ran.err
    (tmp_path / "my_env").write_bytes("NCCL_A=one\rtwo\u2028\x85\x0c\x1c\r\nB=1\n".encode())
    ran = mizzen("run", "--num_gpus", 1, "--dry-run", "t.py")
    assert ran.code == 0 and "  B (its value is not shown)\n  NCCL_A='one\rtwo\u2028\x85\x0c\x1c'\n" in ran.out


def test_a_folder_that_was_removed(mizzen, monkeypatch, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    ran = mizzen("run", "--num_gpus", 1, "t.py")
    monkeypatch.chdir(tmp_path)
    assert ran.code == 2 and "the current folder has been removed" in ran.err


def test_a_value_may_look_like_an_option(mizzen, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=1\n")
    words = ("run", "-H", "hosts", "--launcher", "slurm", "--launcher_args", "--partition=gpu", "--include", "")
    ran = mizzen(*words, "--dry-run", "t.py", "--launcher_args", "x")
    assert ran.code == 0, ran.err
    assert " --partition=gpu " in ran.out and "t.py --local_rank=0 --launcher_args x" in ran.out
    assert "argument --launcher_args: expected one argument" in mizzen("run", "--launcher_args").err


def test_wrong_words(mizzen):
    for words, said in (
        (["--num_gpus", "0", "t.py"], "'0' is not a whole number of at least 1"),
        (["--launcher", "rsh", "t.py"], "'rsh' is unknown; known: ssh, pdsh"),
        (["--master_port", "99999", "t.py"], "is no port"),
        (["--grace", "-1", "t.py"], "not a number of seconds"),
        ([], "nothing to run"),
    ):
        ran = mizzen("run", *words)
        assert ran.code == 2 and said in ran.err


def test_ssh_needs_a_command_and_a_file(mizzen, tmp_path):
    assert "nothing to run" in mizzen("ssh").err
    assert "no such file" in mizzen("ssh", "-f", tmp_path / "no", "ls").err


def test_words_for_ssh_that_do_not_end(mizzen, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("nowhere.invalid slots=1\n")
    for words in (
        ["run", "--hostfile", "hosts", "--launcher_args", "a 'b", "t.py"],
        ["run", "--launcher_args", "a 'b", "t.py"],
    ):
        assert "No closing quotation" in mizzen(*words).err
    assert "No closing quotation" in mizzen("ssh", "-f", "hosts", "--launcher_args", "a 'b", "ls").err


def test_ssh_with_a_file_that_is_no_text_and_without_its_program(mizzen, monkeypatch, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert "it cannot be read" in mizzen("ssh", "-f", tmp_path / "bytes", "ls").err
    assert "it cannot be read" in mizzen("ssh", "-f", tmp_path, "ls").err
    (tmp_path / "hosts").write_text("w0 slots=1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (
        "mizzen ssh needs ssh, which is not installed: install the Debian package openssh-client"
        in mizzen("ssh", "-f", tmp_path / "hosts", "ls").err
    )
    ran = mizzen("run", "--hostfile", tmp_path / "hosts", "t.py")
    assert "install the Debian package openssh-client, or start each node by itself with --no_ssh" in ran.err


def test_help_is_in_groups(mizzen, capsys):
    with pytest.raises(SystemExit):
        mizzen("run", "--help")
    shown = capsys.readouterr().out
    for title, _ in GROUPS:
        assert f"\n{title}:" in shown
