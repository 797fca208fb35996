import os

from mizzen.watch.tail import CHUNK, Tail


def test_lines_come_once_and_the_last_waits_for_its_end(tmp_path):
    path = tmp_path / "a"
    tail = Tail(path)
    assert tail.read() == []  # not there yet
    path.write_bytes(b"one\ntw")
    assert tail.read() == [b"one"]
    assert tail.read() == [] and tail.left == 2
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tail.read() == [b"two", b"three"]
    assert tail.read() == [] and tail.left == 0


def test_a_file_that_was_emptied_or_rotated_is_read_from_its_start(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"one\ntwo\n")
    tail = Tail(path)
    tail.read()
    path.write_bytes(b"new\n")  # shorter than what was read
    assert tail.read() + tail.read() == [b"new"]
    path.rename(tmp_path / "a.1")
    path.write_bytes(b"longer than what was read before\n")
    assert tail.read() + tail.read() == [b"longer than what was read before"]


def test_a_copy_that_was_refreshed_is_read_on(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"one\ntwo\n")
    tail = Tail(path)
    tail.read()
    (tmp_path / "b").write_bytes(b"one\ntwo\nthree\n")
    os.replace(tmp_path / "b", path)
    assert tail.read() == [b"three"]


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a")
    tail = Tail(tmp_path / "a")
    assert tail.read() == []


def test_a_line_without_end_is_passed_over(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x" * (2 * CHUNK + 5) + b"\nafter\n")
    tail = Tail(path)
    found = [line for _ in range(4) for line in tail.read()]
    assert found == [b"after"]
