"""The communication benchmark: same numbers on all ranks, and the arithmetic of bandwidth."""

import json

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from mizzen.diagnose.bench import OPERATIONS, BenchResult, Measurement, bench, measure, render
from mizzen.errors import UsageError


def run_all(sizes):
    found = bench(sizes=sizes, trials=3, warmups=1)
    value = torch.ones(1)
    dist.all_reduce(value)
    return found, value.item()


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_operation_on_every_rank(world, ranks):
    results = world(ranks).run(run_all, [64, 1000])
    found = results[0][0]
    assert all(other == found and total == ranks for other, total in results)
    assert (found.backend, found.device, found.ranks) == ("gloo", "cpu", ranks)
    assert [row.operation for row in found.measurements] == [name for name in OPERATIONS for _ in range(2)]
    for row in found.measurements:
        assert row.size % (4 * ranks) == 0 and row.size >= 64 and row.size - 1000 < 4 * ranks
        assert len(row.seconds) == 3 and all(second > 0 for second in row.seconds)


def one_rank():
    return [row.operation for row in measure(tuple(OPERATIONS), [64], trials=1, warmups=0)]


def test_one_rank_has_nobody_to_send_to(world):
    assert world(1).run(one_rank) == [[name for name in OPERATIONS if name != "send_recv"]]


def in_a_group():
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    return bench(["send_recv", "broadcast"], [256], trials=2, group=group).ranks


def test_in_a_group_that_starts_elsewhere(world):
    assert world(3).run(in_a_group) == [None, 2, 2]


def results_are_right():
    """What the operations leave behind, on ranks that bring ones."""
    from mizzen.diagnose.bench import Participants

    size, rank = dist.get_world_size(), dist.get_rank()
    peers = Participants(None, tuple(range(size)), rank)
    left = {}
    for name, operation in OPERATIONS.items():
        whole, part = torch.full((2 * size,), float(rank + 1)), torch.full((2,), float(rank + 1))
        operation.run(whole, part, peers)
        left[name] = (whole.tolist(), part.tolist())
    return left


def test_the_operations_are_what_they_are_called(world):
    first, second = world(2).run(results_are_right)
    assert first["all_reduce"][0] == second["all_reduce"][0] == [3.0] * 4
    assert first["all_gather"][0] == second["all_gather"][0] == [1.0, 1.0, 2.0, 2.0]
    assert first["reduce_scatter"][1] == second["reduce_scatter"][1] == [3.0, 3.0]
    assert first["broadcast"][0] == second["broadcast"][0] == [1.0] * 4
    assert second["send_recv"][0] == second["all_to_all"][0] == [2.0] * 4


@pytest.mark.parametrize(
    ("operation", "share"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1),
        ("send_recv", 1),
    ],
)
def test_bandwidth(operation, share):
    row = Measurement(operation, 4_000_000, 4, (0.001, 0.004, 0.002, 0.100, 0.003))
    assert row.median == 0.003
    assert row.algorithm == pytest.approx(4 / 3)
    assert row.bus == pytest.approx(4 / 3 * share)
    assert [row.percentile(percent) for percent in (0, 5, 20, 50, 80, 95, 100)] == [
        0.001, 0.001, 0.001, 0.003, 0.004, 0.100, 0.100
    ]  # fmt: skip


def test_as_json_and_as_a_table():
    found = BenchResult("gloo", "cpu", 2, (Measurement("all_reduce", 1 << 20, 2, (0.002,)),))
    again = json.loads(json.dumps(found.as_dict()))
    assert again["measurements"][0] == {
        "operation": "all_reduce",
        "bytes": 1048576,
        "p5_us": 2000.0,
        "p50_us": 2000.0,
        "p95_us": 2000.0,
        "algorithm_gb_per_s": pytest.approx(0.524288),
        "bus_gb_per_s": pytest.approx(0.524288),
        "trials": 1,
    }
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(found))
    text = console.export_text()
    assert "2 ranks, gloo, cpu" in text and "1,048,576" in text and "0.524" in text


def test_what_cannot_be_measured_is_named():
    with pytest.raises(UsageError, match="no operation 'gossip' to measure: use all_reduce, all_gather"):
        next(measure(["gossip"], [64]))
    with pytest.raises(UsageError, match="at least 1 trial"):
        next(measure(["all_reduce"], [64], trials=0))
