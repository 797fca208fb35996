"""A short, seeded part of `make faults-checkpoint`."""

import pytest

from faults import bombs, checks
from faults.checks import Budget

BUDGET = Budget(most=4, seed=20261115)


def assert_fine(result: checks.Result, least: int) -> None:
    assert result.failures == []
    assert result.tried >= least


@pytest.mark.parametrize(("beside", "again"), [(False, True), (True, False)])
def test_kill(world, tmp_path, beside, again):
    assert_fine(checks.kill(world, tmp_path, BUDGET, beside=beside, again=again), 4)


def test_power_cut(tmp_path):
    assert_fine(checks.power_cut(tmp_path, BUDGET), 40)


def test_one_flipped_bit(tmp_path):
    assert_fine(checks.flips(tmp_path, BUDGET, 100), 100)


def test_files_cut_off_gone_or_exchanged(tmp_path):
    assert_fine(checks.shortened(tmp_path), 40)


def test_disk_errors(tmp_path):
    assert_fine(checks.disk_errors(tmp_path, BUDGET), 16)


def test_short_writes(python):
    """In a process of its own: it limits the size of all its files."""
    code = (
        "from pathlib import Path; from tempfile import TemporaryDirectory; from faults import checks\n"
        "with TemporaryDirectory() as folder: result = checks.short_writes(Path(folder))\n"
        "print(result.tried, result.failures)"
    )
    assert python("-c", code).stdout.splitlines()[-1:] == ["5 []"]


def test_bombs(tmp_path):
    assert_fine(bombs.bombs(tmp_path), 1)


def test_files_that_are_none(tmp_path):
    assert_fine(bombs.strange_files(tmp_path), 49)


def test_ranks_that_name_different_folders(world, tmp_path):
    assert_fine(bombs.folders(world, tmp_path), 7)


def test_malicious_folders(tmp_path):
    assert_fine(checks.malice(tmp_path), 60)
