"""File operations: their order, what is left when each of them fails or is the last, and what the errors say."""

import errno
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mizzen import files
from mizzen.errors import FileError

OLD, NEW = b"the old content", b"the new content, which is longer"


def names_of(folder):
    return sorted(path.name for path in folder.iterdir())


def recorded(call):
    """The operations of a call as "operation name", the random part of a name beside the final one left out."""
    seen = []
    with files.watched(lambda operation, path: seen.append(f"{operation} {re.sub(r'[.][0-9a-f]{16}', '', path.name)}")):
        call()
    return seen


class Fail:
    """A hook that fails the operation of a given number, and only that one."""

    def __init__(self, number, code=errno.EIO):
        self.left, self.code = number, code

    def __call__(self, operation, path):
        self.left -= 1
        if self.left == -1:
            raise OSError(self.code, os.strerror(self.code))


COMMIT = ["open f.new", "write f.new", "fsync f.new", "close f.new", "rename f", "fsync here"]


@pytest.fixture
def here(tmp_path):
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def test_a_new_file_is_written_flushed_and_closed(here):
    assert recorded(lambda: files.write_bytes(here / "f", NEW)) == ["open f", "write f", "fsync f", "close f"]
    assert (here / "f").read_bytes() == NEW


def test_a_flush_can_be_left_to_the_caller(here):
    assert recorded(lambda: files.write_bytes(here / "f", NEW, fsync=False)) == ["open f", "write f", "close f"]


def test_chunks_are_written_in_order_and_counted(here):
    chunks = [b"ab", bytearray(b"cd"), b"", memoryview(b"ef"), memoryview(b"\1\0\2\0").cast("H")]
    assert files.write_chunks(here / "f", iter(chunks)) == 10
    assert (here / "f").read_bytes() == b"abcdef\1\0\2\0"


def test_short_writes_are_completed(here, monkeypatch):
    class Miser:
        """A file that takes three bytes at a time."""

        def __init__(self, path):
            self.file = open(path, "xb", buffering=0)  # noqa: SIM115
            self.fileno, self.close = self.file.fileno, self.file.close

        def write(self, data):
            return self.file.write(data[:3])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    monkeypatch.setattr(files, "_create", Miser)
    assert recorded(lambda: files.write_bytes(here / "f", b"12345678")) == [
        "open f",
        *["write f"] * 3,
        "fsync f",
        "close f",
    ]
    assert (here / "f").read_bytes() == b"12345678"


def test_an_existing_file_is_never_overwritten(here):
    (here / "f").write_bytes(OLD)
    with pytest.raises(FileError, match="open .*/f: File exists"):
        files.write_bytes(here / "f", NEW)
    assert (here / "f").read_bytes() == OLD


def test_a_failing_source_of_chunks_leaves_no_file(here):
    def chunks():
        yield b"some"
        raise KeyError("no more")

    with pytest.raises(KeyError):
        files.write_chunks(here / "f", chunks())
    assert names_of(here) == []


@pytest.mark.parametrize("number", range(4))
def test_a_failed_write_leaves_no_file(here, number):
    with files.watched(Fail(number)), pytest.raises(FileError, match="Input/output error") as failure:
        files.write_bytes(here / "f", NEW)
    assert failure.value.errno == errno.EIO
    assert names_of(here) == []


def test_a_commit_flushes_before_it_renames_and_the_name_after(here):
    assert recorded(lambda: files.commit_bytes(here / "f", NEW)) == COMMIT
    assert recorded(lambda: files.commit_text(here / "f", "grüße")) == COMMIT
    assert (here / "f").read_text(encoding="utf8") == "grüße"
    assert names_of(here) == ["f"]


@pytest.mark.parametrize("old", [OLD, None], ids=["over an old file", "where nothing was"])
@pytest.mark.parametrize("number", range(len(COMMIT)), ids=COMMIT)
def test_a_failed_commit_leaves_the_old_content_or_the_new(here, number, old):
    if old is not None:
        (here / "f").write_bytes(old)
    with files.watched(Fail(number)), pytest.raises(FileError, match=COMMIT[number].split()[0]):
        files.commit_bytes(here / "f", NEW)
    renamed = COMMIT[number] == "fsync here"
    assert names_of(here) == (["f"] if old is not None or renamed else [])
    if names_of(here):
        assert (here / "f").read_bytes() == (NEW if renamed else old)


def write_through(path):
    with files.committing(path) as file:
        file.write(NEW)


@pytest.mark.parametrize("commit", [lambda path: files.commit_chunks(path, [NEW[:5], NEW[5:]]), write_through])
def test_the_other_commits_leave_the_old_content_or_the_new_too(here, commit):
    operations = recorded(lambda: commit(here / "f"))
    kinds = [operation.split()[0] for operation in operations if operation != "close f.new"]
    assert list(dict.fromkeys(kinds)) == ["listdir", "open", "write", "fsync", "rename"] and kinds[-1] == "fsync"
    for number in range(len(operations)):
        (here / "f").write_bytes(OLD)
        with files.watched(Fail(number)), pytest.raises(FileError):
            commit(here / "f")
        assert (here / "f").read_bytes() == (NEW if operations[number] == "fsync here" else OLD)
        assert names_of(here) == ["f"]


LARGE = [lambda path: files.commit_chunks(path, [NEW]), write_through]


@pytest.mark.parametrize("commit", LARGE)
def test_what_a_dead_writer_has_left_goes_and_what_a_living_one_writes_stays(here, commit):
    dead, living, strange = files.temporary(here / "f"), files.temporary(here / "f"), here / "f.mine.new"
    for path in (dead, living, strange):
        path.write_bytes(b"half")
    for path in (dead, strange):
        os.utime(path, (0, 0))
    commit(here / "f")
    assert names_of(here) == sorted(["f", living.name, strange.name])


def through_two(path):
    with files.committing(path) as one, files.committing(path) as other:
        one.write(OLD)
        other.write(OLD)


def chunk_by_chunk(path):
    def chunks():
        files.commit_chunks(path, [OLD])
        yield OLD

    files.commit_chunks(path, chunks())


@pytest.mark.parametrize("twice", [through_two, chunk_by_chunk])
def test_two_writers_of_one_path_do_not_meet(here, twice):
    twice(here / "f")
    assert (here / "f").read_bytes() == OLD and names_of(here) == ["f"]


KILLED = """
import os, signal, sys
from mizzen import files

left = int(sys.argv[2])

def hook(operation, path):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

with files.watched(hook):
    files.commit_bytes(sys.argv[1], sys.argv[3].encode())
"""


def python(code, *arguments, **options):
    environment = dict(os.environ, PYTHONPATH=str(Path(files.__file__).parents[1]))
    return subprocess.run([sys.executable, "-c", code, *arguments], env=environment, text=True, **options)


@pytest.mark.parametrize("number", range(len(COMMIT) + 1), ids=[*COMMIT, "after the last"])
def test_a_killed_commit_leaves_the_old_content_or_the_new(here, number):
    (here / "f").write_bytes(OLD)
    ended = python(KILLED, str(here / "f"), str(number), NEW.decode())
    assert ended.returncode == (-9 if number < len(COMMIT) else 0)
    assert (here / "f").read_bytes() == (NEW if number > COMMIT.index("rename f") else OLD)
    left = [name for name in names_of(here) if name != "f"]
    assert len(left) == (0 < number <= COMMIT.index("rename f")) and all(name.endswith(files.BESIDE) for name in left)
    files.commit_bytes(here / "f", b"third")
    assert (here / "f").read_bytes() == b"third"


def test_commits_of_one_path_from_many_threads_do_not_mix(here):
    contents = {bytes([65 + number]) * 10_000 for number in range(8)}
    threads = [threading.Thread(target=files.commit_bytes, args=(here / "f", content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (here / "f").read_bytes() in contents
    assert names_of(here) == ["f"]


def test_a_rename_flushes_both_folders(here, tmp_path):
    (here / "f").write_bytes(NEW)
    (tmp_path / "g").write_bytes(OLD)
    assert recorded(lambda: files.replace(here / "f", tmp_path / "g")) == [
        "rename g",
        f"fsync {tmp_path.name}",
        "fsync here",
    ]
    assert (tmp_path / "g").read_bytes() == NEW


def test_a_folder_over_a_full_one_is_refused(here, tmp_path):
    (here / "f").touch()
    (tmp_path / "other").mkdir()
    with pytest.raises(FileError, match="rename .*here: Directory not empty"):
        files.replace(tmp_path / "other", here)


def test_folders_are_made_and_each_name_is_flushed(here):
    assert recorded(lambda: files.make_folder(here / "a" / "b")) == ["mkdir a", "fsync here", "mkdir b", "fsync a"]
    assert recorded(lambda: files.make_folder(here / "a" / "b")) == []


def test_a_folder_that_another_rank_makes_first_is_fine(here):
    def another_rank(operation, path):
        if operation == "mkdir":
            path.mkdir()

    with files.watched(another_rank):
        files.make_folder(here / "a")
    assert names_of(here) == ["a"]


def test_a_file_in_the_way_of_a_folder_is_an_error(here):
    (here / "a").touch()
    with pytest.raises(FileError, match="mkdir .*/a: File exists"):
        files.make_folder(here / "a" / "b")


def test_files_are_removed(here):
    (here / "f").touch()
    assert recorded(lambda: files.remove(here / "f")) == ["unlink f"]
    files.remove(here / "f", missing_ok=True)
    with pytest.raises(FileError, match="unlink .*/f: No such file") as failure:
        files.remove(here / "f")
    assert failure.value.errno == errno.ENOENT and isinstance(failure.value, OSError)


def test_a_folder_is_removed_with_its_content_and_links_are_not_followed(here, tmp_path):
    (here / "a").mkdir()
    (here / "a" / "f").touch()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "g").touch()
    (here / "link").symlink_to(tmp_path / "kept")
    assert recorded(lambda: files.remove_folder(here)) == [
        "listdir here",
        "listdir a",
        "unlink f",
        "rmdir a",
        "unlink link",
        "rmdir here",
    ]
    assert names_of(tmp_path) == ["kept"] and names_of(tmp_path / "kept") == ["g"]


def test_listing_is_sorted(here):
    for name in "cab":
        (here / name).write_bytes(name.encode())
    assert files.list_folder(here) == [here / "a", here / "b", here / "c"]
    assert recorded(lambda: files.list_folder(here)) == ["listdir here"]
    with pytest.raises(FileError, match="listdir .*/none"):
        files.list_folder(here / "none")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO], ids=["EINVAL", "EIO"])
def test_a_filesystem_without_a_flush_of_folders_is_fine_but_a_failed_flush_is_not(here, monkeypatch, code):
    def fsync(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    if code == errno.EINVAL:
        files.fsync_folder(here)
    else:
        with pytest.raises(FileError, match="fsync .*here: Input/output error"):
            files.fsync_folder(here)


def test_free_bytes_are_those_of_the_nearest_folder(here):
    room = os.statvfs(here)
    assert abs(files.free_bytes(here / "not" / "yet") - room.f_bavail * room.f_frsize) < 1 << 30
    assert recorded(lambda: files.free_bytes(here)) == ["statfs here"]


def test_an_error_for_lack_of_space_says_how_much(here):
    with files.watched(Fail(1, errno.ENOSPC)), pytest.raises(FileError) as failure:
        files.write_bytes(here / "f", b"x" * 12_345)
    assert re.search(
        r"write .*/f: No space left on device; 12,345 bytes were still .* has [\d,]+ free", str(failure.value)
    )
    assert failure.value.errno == errno.ENOSPC


def test_a_full_filesystem_leaves_the_old_content(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small filesystem is not allowed here")
    try:
        files.commit_bytes(tmp_path / "f", OLD)
        with pytest.raises(FileError, match=r"No space left on device; [\d,]+ bytes were still to be written"):
            files.commit_bytes(tmp_path / "f", b"x" * 100_000)
        assert (tmp_path / "f").read_bytes() == OLD and names_of(tmp_path) == ["f"]
        assert files.free_bytes(tmp_path) > 50_000
    finally:
        subprocess.run(["umount", tmp_path], check=True)


LIMITED = """
import resource, sys
from mizzen import files
from mizzen.errors import FileError

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    files.commit_bytes(sys.argv[1], b"x" * 1500)
except FileError as error:
    print(error)
"""


def test_a_write_that_the_system_cuts_short_and_then_refuses_leaves_the_old_content(here):
    (here / "f").write_bytes(OLD)
    ended = python(LIMITED, str(here / "f"), capture_output=True, check=True)
    assert re.search(r"write .*/f[.][0-9a-f]{16}[.]new: File too large", ended.stdout)
    assert (here / "f").read_bytes() == OLD and names_of(here) == ["f"]


def test_the_hook_sees_other_threads_and_is_taken_off_again(here):
    def call():
        thread = threading.Thread(target=files.write_bytes, args=(here / "f", NEW))
        thread.start()
        thread.join()

    assert recorded(call) == ["open f", "write f", "fsync f", "close f"]
    with pytest.raises(KeyError), files.watched(Fail(0)):
        raise KeyError("out of the block")
    files.write_bytes(here / "g", NEW)
