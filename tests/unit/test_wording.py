import pytest

from mizzen.wording import and_more, byte_size, counted, duration, gib, rank_list


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (-20 * 2**20, "-20.0 MiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (2**41, "2.0 TiB"),
        (2**51, "2048.0 TiB"),
    ],
)
def test_a_size_has_the_largest_unit_that_fits(size, words):
    assert byte_size(size) == words


def test_a_size_that_is_compared_has_one_unit():
    assert [gib(size) for size in (0, 2**20, 3 * 2**40, None)] == ["0.00 GiB", "0.00 GiB", "3072.00 GiB", "unknown"]


def test_a_time_has_the_largest_unit_that_fits():
    words = [duration(seconds) for seconds in (0.4, 59, 90, 3600, 200_000)]
    assert words == ["0 s", "59 s", "1.5 min", "1.0 h", "2.3 d"]


def test_one_is_no_plural():
    assert [counted(count, "host") for count in (0, 1, 2)] == ["0 hosts", "1 host", "2 hosts"]


def test_what_is_left_out_is_counted():
    assert and_more([]) == ""
    assert and_more("ab", 2) == "a, b"
    assert and_more("abcde", 2) == "a, b and 3 more"
    assert and_more((number for number in range(3)), 2, separator="; ") == "0; 1 and 1 more"


def test_ranks_are_named_by_number():
    assert rank_list([2]) == "rank 2"
    assert rank_list(range(16), 3) == "ranks 0, 1, 2 and 13 more"
