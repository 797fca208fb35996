"""The log of collectives on ranks: what is measured, with the size of the group; summaries and stragglers."""

import time

import pytest
import torch

import mizzen.comm as dist
from mizzen.comm import report
from mizzen.comm.report import comm_log


def measured():
    assert not bool(comm_log().records)
    dist.all_reduce(torch.ones(4))  # before it is switched on
    dist.configure(enabled=True)
    pair = dist.new_group([0, 1])
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))
    work = dist.all_gather_into_tensor(torch.ones(30), torch.ones(10), async_op=True)
    logged_early = "all_gather_into_tensor" in list(comm_log().records)
    work.wait()
    if dist.get_rank() < 2:
        dist.all_gather_into_tensor(torch.ones(20), torch.ones(10), group=pair, log_name="in a pair")
    dist.barrier()
    dist.monitored_barrier()
    dist.broadcast_object_list(["x"], src=0)
    dist.all_gather_object([None] * 3, 1)
    dist.all_to_all([torch.ones(2) for _ in range(3)], [torch.ones(2) for _ in range(3)])
    dist.send(torch.ones(2), 1) if dist.get_rank() == 0 else None
    dist.recv(torch.ones(2), 0) if dist.get_rank() == 1 else None
    counts = sum(len(one.latencies) for sizes in comm_log().records.values() for one in sizes.values())
    answer = dist.log_summary(show_straggler=True, return_dict=True)
    dist.reset_log()
    return logged_early, counts, answer, bool(comm_log().records)


def test_everything_is_logged_and_nothing_ends_the_process(world):
    results = world(3).run(measured)
    for rank, (logged_early, counts, answer, still) in enumerate(results):
        summary = answer["summary"]
        assert not logged_early
        assert not still
        assert counts == 9 + (rank < 2) + (rank < 2)  # a message and a gather between ranks 0 and 1
        assert summary["all_reduce"][4000]["count"] == 3
        assert list(summary["all_gather_into_tensor"]) == [120]
        if rank < 2:
            assert list(summary["in a pair"]) == [80]  # two shards, not three
            row = summary["in a pair"][80]
            assert row["busbw_avg_gbps"] == pytest.approx(row["tput_avg_gbps"] / 2)
        row = summary["all_gather_into_tensor"][120]
        assert row["busbw_avg_gbps"] == pytest.approx(row["tput_avg_gbps"] * 2 / 3)
        assert summary["barrier"][0]["count"] == 1
        assert summary["monitored_barrier"][0]["count"] == 1
        assert summary["broadcast_object_list"][0]["count"] == 1
        assert summary["all_gather_object"][0]["count"] == 1
        assert answer["metadata"]["world_size"] == 3
        assert answer["metadata"]["rank"] == rank
        assert answer["metadata"]["timestamp"] <= time.time()
        assert "in a pair" not in answer["straggler_analysis"]  # rank 2 has none to compare
        assert answer["straggler_analysis"]["all_reduce"][4000]["count"] == 3


def late():
    dist.configure(enabled=True)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.5)
    dist.all_reduce(torch.ones(4))
    return dist.log_summary(show_straggler=True, return_dict=True)["straggler_analysis"]["all_reduce"][16]


def test_the_one_that_waited_is_told_for_how_long(world):
    waited, straggler = world(2).run(late)
    assert waited["total_straggler_ms"] > 100
    assert waited["total_straggler_ms"] > straggler["total_straggler_ms"]
    assert waited["total_comm_lat_ms"] == straggler["total_comm_lat_ms"]


def printed():
    dist.configure({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]}})
    dist.all_reduce(torch.ones(256))
    dist.barrier()
    dist.reduce(torch.ones(1), dst=0, prof=True, log_name="asked for")
    assert dist.log_summary() is None
    return list(comm_log().records)


def test_rank_0_prints_what_was_wanted(world, capfd):
    assert world(2).run(printed) == [["all_reduce", "asked for"]] * 2
    said = capfd.readouterr().out
    assert said.count("Comm. Op") == 1
    assert "1 KB" in said
    assert "barrier" not in said
    assert "asked for" in said


def synchronized():
    """How often a device is waited for: twice for an operation that is logged, never for another."""
    calls = []
    import mizzen.comm.timing as ledger

    ledger._synchronize = lambda device: calls.append(device.type)
    dist.configure(enabled=True, prof_all=False, prof_ops=["barrier"])
    dist.all_reduce(torch.ones(2))
    before = list(calls)
    dist.barrier()
    return before, calls, report.comm_log().settings.enabled


def test_only_what_is_logged_waits_for_the_device(world):
    assert world(2).run(synchronized) == [([], ["cpu", "cpu"], True)] * 2
