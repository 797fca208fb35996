import pytest

from mizzen.monitor.output import LineFile


def test_lines_are_there_at_once_and_a_second_run_appends(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    for run in (1, 2):
        file = LineFile(path, header="header")
        file.append(f"run {run}")
        assert path.read_text().splitlines()[-1] == f"run {run}"
        file.close()
    assert path.read_text() == "header\nrun 1\nrun 2\n"


def test_half_a_line_of_an_earlier_run_spoils_only_itself(tmp_path):
    path = tmp_path / "file"
    path.write_text("whole\nhal")
    LineFile(path).append("next")
    assert path.read_text() == "whole\nhal\nnext\n"


def test_a_line_that_the_system_takes_in_parts_is_written_whole(tmp_path):
    file = LineFile(path := tmp_path / "file")

    class Slow:
        def __init__(self, inner):
            self.inner = inner

        def write(self, data):
            return self.inner.write(data[:3])

    file._file = Slow(file._file)
    file.append("a long line")
    assert path.read_text() == "a long line\n"


def test_a_full_disk_is_an_error():
    with pytest.raises(OSError, match="No space left"):
        LineFile("/dev/full").append("line")
