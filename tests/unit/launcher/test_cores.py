"""Cores for ranks."""

import pytest

from mizzen.errors import UsageError
from mizzen.launcher.cores import Domain, check_affinity, domains, numactl, parse_cores, physical, shares


def test_lists():
    assert parse_cores("1,3-5,7") == (1, 3, 4, 5, 7)
    for text in ("3-1", "1,1", "1-3,2", "a", "1-", ""):
        with pytest.raises(UsageError, match="--bind_core_list"):
            parse_cores(text)


def test_shares():
    assert shares(range(5), 2) == [(0, 1), (2, 3)]
    with pytest.raises(UsageError, match="2 cores for 3 ranks"):
        shares((0, 1), 3)


def test_the_words_of_numactl():
    two = (Domain(0, (0, 1)), Domain(1, (2, 3)))
    assert numactl((2, 3), two) == ("numactl", "-C", "2,3", "-m", "1")
    assert numactl((1, 2), two) == ("numactl", "-C", "1,2")
    assert numactl((0,), (Domain(0, (0, 1)),)) == ("numactl", "-C", "0")
    assert numactl((0,), (Domain(0, (0, 1)), Domain(1, ()))) == ("numactl", "-C", "0")


def test_only_one_hand_on_the_wheel():
    with pytest.raises(UsageError, match="KMP_AFFINITY"):
        check_affinity({"KMP_AFFINITY": "compact"})


def test_what_the_kernel_says(tmp_path):
    for node, cores in (("node0", "0-1,4"), ("node1", "")):
        folder = tmp_path / "sys/devices/system/node" / node
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    assert domains(tmp_path) == (Domain(0, (0, 1, 4)), Domain(1, ()))
    for core, siblings in ((0, "0,2"), (1, "1"), (2, "0,2")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings)
    assert physical((2, 1, 0), tmp_path) == (0, 1)
