"""`mizzen bench`: `comm` on one rank, `io` on small files; sizes in words, tables, JSON, a plot."""

import argparse
import json

import pytest

from mizzen.cli.bench import size
from mizzen.config.load import load
from mizzen.offload import io_bench


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


SHORT = ("--size", "1MiB", "--block-sizes", "64KiB", "128KiB", "--depths", 1, 2, "--trials", 1)


def test_disks_are_measured_beside_dd(mizzen, tmp_path):
    ran = mizzen("bench", "io", tmp_path / "a", *SHORT, "--check", "--plot", tmp_path / "io.svg", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    keys = [
        (row["by"], row["operation"], row["block_size"], row["queue_depth"], row["direct"]) for row in found["timings"]
    ]
    sizes, names = (1 << 16, 1 << 17), ("write", "read")
    assert sorted(keys) == sorted(
        [("dd", name, block, 1, True) for block in sizes for name in names]
        + [
            ("mizzen", name, block, depth, direct)
            for direct in (True, False)
            for block in sizes
            for depth in (1, 2)
            for name in names
        ]
    )
    assert all(row["gb_per_s"] > 0 for row in found["timings"])
    assert found["aio"]["block_size"] in sizes and found["aio"]["queue_depth"] in (1, 2)
    picture = (tmp_path / "io.svg").read_text()
    assert picture.startswith("<svg") and picture.count("<polyline") == 2 * (1 + 4 + 1) + 4 and ">dd<" in picture
    assert not list((tmp_path / "a").iterdir())


def test_several_paths_are_striped_and_the_settings_are_a_snippet(mizzen, tmp_path):
    ran = mizzen("bench", "io", tmp_path / "a", tmp_path / "b", *SHORT, "--direct", "yes", "--no-dd")
    assert ran.code == 0, ran.err
    assert "read GB/s" in ran.out and "write: " in ran.out
    snippet = json.loads(ran.out[ran.out.index("{") :])
    assert load(snippet).aio.block_size in (1 << 16, 1 << 17)
    assert not list((tmp_path / "a").iterdir()) and not list((tmp_path / "b").iterdir())


def test_what_cannot_be_measured_is_refused(mizzen, tmp_path):
    assert "depths from 1 to" in mizzen("bench", "io", tmp_path, "--depths", 1000).err
    ran = mizzen("bench", "io", tmp_path, "--size", "1000000GiB", "--direct", "yes")
    assert ran.code == 1 and "are free there" in ran.err
    (tmp_path / "file").touch()
    assert mizzen("bench", "io", tmp_path / "file").code == 1


def timing(operation, block, depth, seconds, by="mizzen", direct=True):
    return io_bench.IoTiming(operation, io_bench.IoSetting(block, depth, direct), 10**9, (seconds,), by)


def test_the_best_setting_is_that_of_both_together_with_few_threads():
    rows = [("read", 1, 1, 1.0), ("write", 1, 1, 9.0), ("read", 1, 4, 2.0), ("write", 1, 4, 2.0)]
    more = [("read", 1, 16, 1.99), ("write", 1, 16, 2.0), ("read", 2, 8, 3.0), ("write", 2, 8, 3.0)]
    found = io_bench.IoResult(("x",), 10**9, tuple(timing(*row) for row in rows + more))
    assert found.best() == io_bench.IoSetting(1, 4)
    assert found.fastest("mizzen", "read").rate == 1.0 and found.fastest("dd", "read") is None
