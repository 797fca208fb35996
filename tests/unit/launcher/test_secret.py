"""The secret of nodes that are started one by one."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from mizzen.errors import UsageError
from mizzen.launcher.secret import FILE, common_secret


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
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_a_file_that_others_can_read_is_refused(tmp_path):
    common_secret({}, tmp_path)
    os.chmod(tmp_path / FILE, 0o640)
    with pytest.raises(UsageError, match="others can read or write it: chmod 600 it"):
        common_secret({}, tmp_path)


def test_a_home_that_takes_no_file(tmp_path):
    with pytest.raises(UsageError, match="cannot be kept there .*set MIZZEN_SECRET to the same long random word"):
        common_secret({}, tmp_path / "nowhere")
