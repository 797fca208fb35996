"""`mizzen bench comm` on one rank: sizes in words, a table, JSON."""

import argparse
import json

import pytest

from mizzen.cli.bench import size


@pytest.mark.parametrize(
    ("text", "number"),
    [("1", 1), ("65536", 65536), ("64KiB", 65536), ("64k", 65536), ("1 MB", 2**20), ("2GiB", 2**31), ("7B", 7)],
)
def test_sizes_have_units(text, number):
    assert size(text) == number


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5M", "M", "1T", "1KK", "\u0661"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
        size(text)


def test_one_rank_is_measured_and_told_that_it_is_alone(mizzen):
    ran = mizzen("bench", "comm", "--operations", "all_reduce", "--sizes", "1KiB", "--trials", 2, "--json")
    assert ran.code == 0
    found = json.loads(ran.out)
    assert found["ranks"] == 1
    assert [(row["operation"], row["bytes"]) for row in found["measurements"]] == [("all_reduce", 1024)]
    assert "one rank talks to itself" in ran.err


def test_the_table_has_a_row_for_each_size(mizzen):
    ran = mizzen("bench", "comm", "--operations", "broadcast", "--sizes", "1KiB", "4KiB", "--trials", 1)
    assert ran.code == 0
    assert ran.out.count("broadcast") == 2


def test_an_unknown_operation_is_refused(mizzen):
    ran = mizzen("bench", "comm", "--operations", "shout")
    assert ran.code == 2
    assert "shout" in ran.err
