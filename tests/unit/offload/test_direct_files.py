"""One file past the page cache: what is aligned, what is not, and what goes wrong."""

import errno
import gc
import mmap
import os

import pytest

from mizzen import files
from mizzen.ambient import AMBIENT
from mizzen.errors import FileError
from mizzen.offload.direct_files import ALIGNMENT, DirectFile, address, aligned


@pytest.fixture
def warnings(monkeypatch):
    monkeypatch.setattr(AMBIENT, "warned", set())
    return AMBIENT.warned


def memory(size, fill=None):
    whole = memoryview(mmap.mmap(-1, aligned(size) or ALIGNMENT))[:size]
    if fill is not None:
        whole[:] = fill
    return whole


def flags_of(monkeypatch):
    """The flags of every file that is opened from now on."""
    seen, real = [], os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *rest: seen.append(flags) or real(path, flags, *rest))
    return seen


@pytest.mark.parametrize("offset", [0, ALIGNMENT, 5])
@pytest.mark.parametrize("size", [0, 1, ALIGNMENT, 3 * ALIGNMENT, 3 * ALIGNMENT + 7])
@pytest.mark.parametrize("shift", [0, 3])
def test_what_was_written_is_read(tmp_path, offset, size, shift):
    content = os.urandom(size)
    source, target = memory(shift + size), memory(shift + size)
    source[shift:] = content
    with DirectFile(tmp_path / "f") as file:
        file.write_from(source[shift:], offset)
        file.read_into(target[shift:], offset)
    assert bytes(target[shift:]) == content
    assert (tmp_path / "f").read_bytes()[offset:] == content


def test_aligned_bytes_go_past_the_cache_and_others_through_it(tmp_path, monkeypatch):
    seen = flags_of(monkeypatch)
    with DirectFile(tmp_path / "f") as file:
        assert file.is_direct
        file.write_from(memory(ALIGNMENT), 0)
        assert [bool(flags & os.O_DIRECT) for flags in seen] == [True]
        file.write_from(memory(7), ALIGNMENT)
        file.write_from(memory(7), ALIGNMENT)
        assert [bool(flags & os.O_DIRECT) for flags in seen] == [True, False]


def test_a_memory_that_cannot_be_written_has_no_address():
    assert address(memoryview(b"abc")) % 2 and address(memory(ALIGNMENT)) % ALIGNMENT == 0


@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_filesystem_without_direct_files_is_used_through_the_cache_and_named_once(
    tmp_path, monkeypatch, warnings, caplog, refused
):
    real = os.open

    def refuse_to_open(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    direct = set()

    def refuse_to_write(descriptor, views, offset, write=os.pwritev):
        if descriptor in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, views, offset)

    def note(path, flags, *rest):
        descriptor = real(path, flags, *rest)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    if refused == "open":
        monkeypatch.setattr(os, "open", refuse_to_open)
    else:
        monkeypatch.setattr(os, "open", note)
        monkeypatch.setattr(os, "pwritev", refuse_to_write)
    with caplog.at_level("WARNING", logger="mizzen"):
        for name in "ab":
            with DirectFile(tmp_path / name) as file:
                file.write_from(memory(ALIGNMENT, b"x" * ALIGNMENT), 0)
                assert not file.is_direct
                back = memory(ALIGNMENT)
                file.read_into(back, 0)
                assert bytes(back) == b"x" * ALIGNMENT
    assert len(warnings) == 1 and str(tmp_path) in next(iter(warnings))


def test_without_the_wish_nothing_is_direct_and_nothing_is_said(tmp_path, warnings):
    with DirectFile(tmp_path / "f", direct=False) as file:
        file.write_from(memory(ALIGNMENT), 0)
        assert not file.is_direct
    assert not warnings


@pytest.mark.parametrize("most", [512, 1000, ALIGNMENT])
def test_calls_that_are_cut_short_are_continued(tmp_path, monkeypatch, most):
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda f, views, offset: write(f, [views[0][:most]], offset))
    monkeypatch.setattr(os, "preadv", lambda f, views, offset: read(f, [views[0][:most]], offset))
    content = os.urandom(3 * ALIGNMENT)
    with DirectFile(tmp_path / "f") as file:
        file.write_from(memory(len(content), content), 0)
        back = memory(len(content))
        file.read_into(back, 0)
    assert bytes(back) == content


def test_a_file_that_ends_too_early_is_an_error_with_its_place(tmp_path):
    (tmp_path / "f").write_bytes(b"x" * (2 * ALIGNMENT))
    with (
        DirectFile(tmp_path / "f") as file,
        pytest.raises(FileError, match=r"read .*/f at byte 8,192: the file ends there, before 4,096 more"),
    ):
        file.read_into(memory(3 * ALIGNMENT), 0)


def test_a_write_that_takes_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with (
        DirectFile(tmp_path / "f") as file,
        pytest.raises(FileError, match="write .*/f at byte 4,096: the system"),
    ):
        file.write_from(memory(ALIGNMENT), ALIGNMENT)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_what_the_system_says_has_file_and_place(tmp_path, code):
    def fail(operation, path):
        if operation in ("read", "write"):
            raise OSError(code, os.strerror(code))

    with DirectFile(tmp_path / "f") as file, files.watched(fail):
        for call in (file.write_from, file.read_into):
            with pytest.raises(FileError, match=rf"(read|write) .*/f at byte 8,192: {os.strerror(code)}") as caught:
                call(memory(ALIGNMENT), 2 * ALIGNMENT)
            assert caught.value.errno == code
            assert ("4,096 bytes were still to be written" in str(caught.value)) == (
                code == errno.ENOSPC and call == file.write_from
            )


def test_room_is_taken_on_the_disk(tmp_path):
    with DirectFile(tmp_path / "f") as file:
        file.allocate(1 << 20)
        file.allocate(1 << 10)
        assert (tmp_path / "f").stat().st_size == file.size == 1 << 20
        assert (tmp_path / "f").stat().st_blocks * 512 >= 1 << 20


def test_a_file_that_was_removed_or_cut_off_is_an_error(tmp_path):
    with DirectFile(tmp_path / "f") as file:
        file.allocate(1 << 20)
        file.check()
        os.truncate(tmp_path / "f", 1 << 12)
        with pytest.raises(FileError, match=r"f: it ends at byte 4,096, not at 1,048,576"):
            file.check()
        os.truncate(tmp_path / "f", 1 << 20)
        file.check()
        (tmp_path / "f").unlink()
        with pytest.raises(FileError, match="removed while it was in use"):
            file.check()


def test_a_file_that_grows_while_it_is_looked_at_is_whole(tmp_path, monkeypatch):
    asked = os.fstat
    with DirectFile(tmp_path / "a") as file:
        file.allocate(ALIGNMENT)

        def grow(descriptor):
            found = asked(descriptor)
            if file.size == ALIGNMENT:
                monkeypatch.setattr(os, "fstat", asked)
                file.allocate(2 * ALIGNMENT)  # as another thread does, between the answer and its use
            return found

        monkeypatch.setattr(os, "fstat", grow)
        file.check()
        assert file.size == 2 * ALIGNMENT


def test_what_is_not_there_is_not_made_by_a_reader(tmp_path):
    with pytest.raises(FileError, match="open .*/f: No such file"):
        DirectFile(tmp_path / "f", write=False)


def test_closing_gives_descriptors_back(tmp_path):
    gc.collect()  # other tests of this process leave what garbage holds
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        file = DirectFile(tmp_path / "f")
        file.write_from(memory(ALIGNMENT), 0)
        file.write_from(memory(3), 0)
        file.close()
        file.close()
    assert len(os.listdir("/proc/self/fd")) == before
