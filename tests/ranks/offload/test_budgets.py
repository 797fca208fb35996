"""Budgets that are "auto": the least of all ranks, the same after a resume, and none on the device when bits count."""

import pytest

import mizzen
from behind import use_behind
from mizzen.accelerator.protocol import Capacity
from mizzen.engine import budgets
from mizzen.log import get_logger
from ranks.offload.test_step import Model, places

MIB = 1 << 20


def engine_with(device, host, folder=None, **more):
    """An engine on a machine with so much free memory."""
    accelerator = use_behind()
    accelerator.capacity = lambda index=None: Capacity(total=100 * MIB, available=device)
    budgets.capacity = lambda: Capacity(total=100 * MIB, available=10 * MIB + host)
    said = []
    get_logger().addFilter(lambda record: said.append(record.getMessage()) or True)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 80},
        "optimizer": {"type": "AdamW"},
        "offload": {"device_bytes": "auto", "host_bytes": "auto", "nvme_bytes": "auto"},
        "progress": {"enabled": False},
        "log_level": "info",
        "checkpoint": {"dir": folder} if folder else {},
        **more,
    }
    return mizzen.initialize(model=Model(), config=config)[0], said


def own(engine):
    return engine.settings.offload.budgets


def agreed(folder):
    rank = mizzen.comm.get_rank()
    first, said = engine_with(6000 + 1000 * rank, 10000 - 1000 * rank)
    found = {"first": own(first), "rests": set(places(first)), "said": [line for line in said if "offload" in line]}
    first.save_checkpoint(folder)
    first.destroy()
    for name, free, more in (
        ("other", 8000, {}),
        ("resumed", 8000, {"folder": folder}),
        ("short", 2200, {"folder": folder}),
        ("fixed", 8000, {"deterministic": True}),
    ):
        engine, said = engine_with(free, 20000, **more)
        found[name] = own(engine)
        if name == "other":
            engine.load_checkpoint(folder)
        found[f"{name} said"] = [line for line in said if "device_bytes" in line or "do not fit" in line]
        engine.destroy()
    return found


def test_the_least_of_all_ranks_is_agreed_on_saved_and_taken_again(world, tmp_path):
    one, two = world(2).run(agreed, str(tmp_path))
    assert one["first"] == two["first"] and one["resumed"] == two["resumed"]
    first = one["first"]
    assert 0 < first["device_bytes"] < 3000 and 0 < first["host_bytes"] < 4500 and first["nvme_bytes"] == 0
    assert one["rests"] == {"device", "host"}
    assert any("from what is free" in line for line in one["said"])
    assert one["other"]["device_bytes"] == first["device_bytes"] + 1000
    assert "was saved with offload.device_bytes" in one["other said"][0]
    assert one["resumed"] == first and one["resumed said"] == []
    assert one["short"]["device_bytes"] < first["device_bytes"]
    assert "do not fit now (device" in one["short said"][0]
    assert one["fixed"]["device_bytes"] == 0


def with_parameters(host):
    """Budgets where parameters rest in host memory, too, and how much of it that is."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": {"device": "cpu"}}
    engine, _ = engine_with(0, host, zero_optimization=zero)
    shards = sum(unit.messages[0].rests[0].stand.nbytes for unit in engine.stores[0].units if unit.messages)
    return own(engine), shards, set(places(engine))


def test_parameters_in_host_memory_have_their_part_of_its_budget(world):
    ((budgets, shards, rests),) = world(1).run(with_parameters, 20000)
    assert shards > 600
    assert rests == {"host"}
    gradients = 2 * shards  # in fp32, beside the budget
    assert budgets == {"device_bytes": 0, "host_bytes": 20000 - gradients, "nvme_bytes": 0}
    with pytest.raises(Exception, match="parameters of .* rest in host memory .*, and offload.host_bytes is"):
        world(1).run(with_parameters, shards - 1)
