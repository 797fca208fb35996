"""What a run leaves behind: tables that line up, JSON with every step, and the systems that failed by name."""

import json

import pytest
from bench.record import Record, Result, equal_losses, header, is_ours, table, versus


def result(name, factor=1.0, losses=(8.0, 7.5)):
    turns = [[factor], [2 * factor], [factor]]
    return Result(name, turns, [[0.5 * factor**2]] * 3, tuple(losses), peak=10**9, setup=1.5)


@pytest.fixture
def record():
    results = (result("floor"), result("ddp", 1.25), result("mizzen-0", 1.0), result("mizzen-2", 1.5))
    return Record(
        "cpu_ranks",
        {"layers": 8},
        results,
        failures={"deepspeed-2": "OSError: no compiler"},
        surroundings={"torch": "2.13.0"},
        load=(0.1, 2.0),
        date="2026-01-02T03:04:05+00:00",
    )


def test_a_table_lines_up_and_its_numbers_stand_to_the_right():
    assert table(["system", "ms"], [("a", 1), ("long one", 1234)]).splitlines() == [
        "| system   |   ms |",
        "|----------|-----:|",
        "| a        |    1 |",
        "| long one | 1234 |",
    ]


def test_a_table_without_rows_still_has_its_heads():
    assert table(["system", "ms"], []).splitlines() == ["| system | ms |", "|--------|---:|"]


def test_ours_against_each_peer(record):
    lines = versus(record.results).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["floor", "ddp"]
    assert "mizzen-0" in lines[0] and "mizzen-2" in lines[0]
    assert "0.800 (0.800 - 0.800)" in lines[3] and "1.200 (1.200 - 1.200)" in lines[3]


def test_processor_time_is_compared_apart_from_it(record):
    lines = versus(record.results, "processor").splitlines()
    assert lines[0].startswith("| processor time")
    assert "0.640 (0.640 - 0.640)" in lines[3] and "1.440 (1.440 - 1.440)" in lines[3]


def test_without_a_peer_there_is_nothing_to_compare(record):
    assert versus([r for r in record.results if is_ours(r.name)]).startswith("nothing to compare")
    assert versus([r for r in record.results if not is_ours(r.name)]).startswith("nothing to compare")


def test_the_json_has_everything(record, tmp_path):
    path = tmp_path / "deeper" / "run.json"
    record.write(path)
    found = json.loads(path.read_text())
    assert found["date"] == "2026-01-02T03:04:05+00:00"
    assert found["load"] == {"before": 0.1, "after": 2.0}
    assert found["machine"]["cores"] >= 1 and found["machine"]["processor"]
    assert found["surroundings"] == {"torch": "2.13.0"}
    assert found["systems"]["ddp"]["turns"] == [[1.25], [2.5], [1.25]]
    assert found["systems"]["ddp"]["seconds_per_step"] == 1.25
    assert found["failures"] == {"deepspeed-2": "OSError: no compiler"}
    pairs = {(row["of"], row["to"]): row["value"] for row in found["ratios"]}
    assert [row["processor"]["value"] for row in found["ratios"]] == pytest.approx([1.0, 0.64, 2.25, 1.44])
    assert pairs == {
        ("mizzen-0", "floor"): 1.0,
        ("mizzen-0", "ddp"): 0.8,
        ("mizzen-2", "floor"): 1.5,
        ("mizzen-2", "ddp"): 1.2,
    }


def test_the_header_says_where_when_and_who_is_missing(record):
    text = header(record)
    for words in (
        "cpu_ranks, 2026-01-02",
        "torch 2.13.0",
        "load average 0.1",
        "deepspeed-2 did not take part: OSError",
    ):
        assert words in text


def test_a_result_is_found_by_name(record):
    assert record.result("ddp").seconds == 1.25
    assert record.result("deepspeed-2") is None


def test_losses_are_held_against_the_first():
    found = equal_losses([result("a"), result("b", losses=(8.00004, 7.5)), result("c", losses=(8.0, 7.5001))])
    assert found == {"a": "equal", "b": "equal", "c": "off by 1.0e-04"}


def test_losses_of_different_lengths_are_no_comparison():
    with pytest.raises(ValueError):
        equal_losses([result("a"), result("b", losses=(8.0,))])
