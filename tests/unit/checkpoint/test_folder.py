"""Folders of checkpoints that others use too: what is closed, what arrives, what cannot be removed."""

import errno
import os
import shutil

import pytest
import torch

from mizzen.checkpoint.choose import candidates
from mizzen.checkpoint.folder import committed, delete, read_latest, sweep_all
from mizzen.checkpoint.read import Reader
from mizzen.errors import FileError
from mizzen.files import watched
from unit.checkpoint.test_files import save

ONE = {"a": torch.ones(3)}


def failing(operation, name, code=errno.EIO):
    def fail(what, path):
        if what == operation and path.name == name:
            raise OSError(code, os.strerror(code))

    return watched(fail)


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path):
    save(tmp_path / "root", ONE, latest=False)
    with failing("listdir", "root"), pytest.raises(FileError, match="listdir .*: Input/output error"):
        candidates(tmp_path / "root", None, with_older=False)
    assert candidates(tmp_path / "none", None, with_older=False) == []


def test_a_folder_of_others_that_is_closed_to_us(tmp_path):
    """A save and a load go on beside it; who is root sees everything, so the rest is done as somebody else."""
    (tmp_path / "root" / "closed").mkdir(parents=True)
    (tmp_path / "root" / "closed").chmod(0)
    os.chmod(tmp_path / "root", 0o777)
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        if not os.stat(folder).st_mode & 1:
            folder.chmod(folder.stat().st_mode | 0o711)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setuid(65534)
            save(tmp_path / "root", ONE)
            code = int(candidates(tmp_path / "root", None, with_older=True) != ["tag"])
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_one_that_cannot_be_deleted_does_not_keep_the_others(tmp_path, caplog):
    for step in (1, 2, 3):
        save(tmp_path, ONE, tag=f"s{step}", step=step)
    with watched(_protect("s1")):
        save(tmp_path, ONE, tag="s4", step=4, keep_last=1)
    assert [each.folder.name for each in committed(tmp_path)] == ["s1", "s4"]
    assert "s1 was not deleted, or not all of it, although keep_last is 1" in caplog.text


def _protect(tag):
    def fail(what, path):
        if what in ("rename", "unlink") and path.parent.name == tag:
            raise OSError(errno.EACCES, "Permission denied")

    return fail


def test_a_checkpoint_that_is_being_copied_here_is_left_alone(tmp_path, monkeypatch):
    save(tmp_path / "elsewhere", ONE, tag="good")
    root = tmp_path / "root"
    (root / "copy").mkdir(parents=True)
    for path in (tmp_path / "elsewhere" / "good").glob("*.safetensors"):
        shutil.copy2(path, root / "copy")
    save(root, ONE, tag="own")
    assert sweep_all(root) == []
    shutil.copy2(tmp_path / "elsewhere" / "good" / "manifest.json", root / "copy")
    with Reader(root / "copy") as reader:
        assert torch.equal(reader.whole("model", "a"), ONE["a"])
    (root / "copy" / "manifest.json").unlink()
    monkeypatch.setattr("mizzen.checkpoint.folder.LEASE", -1.0)
    assert len(sweep_all(root)) == 1 and not (root / "copy").exists()


@pytest.mark.parametrize("name", ["data", "mark"])
def test_a_deletion_that_was_cut_short_is_completed(tmp_path, name):
    save(tmp_path, {"a": torch.ones(3)}, tag="old")
    save(tmp_path, ONE, tag="new")
    suffix = ".safetensors" if name == "data" else ".saving"

    def fail(what, path):
        if what == "unlink" and path.suffix == suffix:
            raise OSError(errno.EIO, "Input/output error")

    with watched(fail), pytest.raises(FileError):
        delete(committed(tmp_path)[0])
    assert [each.folder.name for each in committed(tmp_path)] == ["new"] and (tmp_path / "old").exists()
    sweep_all(tmp_path)
    assert not (tmp_path / "old").exists() and read_latest(tmp_path) == "new"
