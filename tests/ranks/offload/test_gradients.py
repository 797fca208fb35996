"""Sums of gradients leave the device with the masters, and whoever asks for them sees what he would see there."""

import gc

import pytest
import torch

import mizzen
from behind import use_behind
from breadth import choice
from mizzen.accelerator.protocol import Capacity
from mizzen.parallel.zero.full.share import UnitSums
from ranks.offload.test_parameters import HOST, Wide, left_of, on_device, start, train_model
from ranks.parallel.zero.full.models import config


def use_full_device():
    """A device that has room for nothing that need not be there."""
    accelerator = use_behind()
    accelerator.capacity = lambda index=None: Capacity(total=1 << 40, available=0)
    return accelerator


def units_of(engine):
    return [unit for store in engine.stores for unit in vars(store).get("units", ()) if unit.shares]


def both(dtype, accumulation, keys, zero, *, has_room):
    """A run without offload, and one with it: whether they tell the same, and how many units had sums on the device."""
    plain = {key: value for key, value in zero.items() if not key.startswith("offload")}
    expected = start(dtype, accumulation=accumulation, **plain)
    told, left = train_model(expected, dtype, accumulation, steps=8), left_of(expected)
    expected.destroy()
    use_behind() if has_room else use_full_device()
    engine = start(dtype, accumulation=accumulation, keys=keys, **zero)
    units, most = units_of(engine), 0
    settle = UnitSums.settle

    def counted(unit, **arguments):
        nonlocal most
        settle(unit, **arguments)
        most = max(most, sum(each.sums.tensor is not None for each in units))

    UnitSums.settle = counted
    found = train_model(engine, dtype, accumulation, steps=8)
    UnitSums.settle = settle
    values = left_of(engine)
    engine.destroy()
    different = [name for name in left if not torch.equal(values[name], left[name])]
    return found == told, different, len(units), most


STREAMED = {"offload": {"device_bytes": 0, "streamed_ratio": 1}}
HALF = {"offload": {"device_bytes": 0, "streamed_ratio": 0.5}}
CPU = {"offload_optimizer": {"device": "cpu"}}
CASES = {
    "2 bf16": (2, "bf16", 1, {}, CPU, True),
    "2 bf16 several": (2, "bf16", 3, {}, CPU, False),
    "2 bf16 several with room": (2, "bf16", 3, {}, CPU, True),
    "1 fp16 parameters": (1, "fp16", 2, {}, CPU | {"offload_param": HOST}, False),
    "2 fp32 streamed": (2, "fp32", 2, STREAMED, CPU, False),
    "2 fp16 half streamed": (2, "fp16", 2, HALF, CPU, False),
    "2 bf16 streamed with room": (2, "bf16", 1, STREAMED, CPU, True),
    "2 bf16 parameters streamed with room": (2, "bf16", 1, STREAMED, CPU | {"offload_param": HOST}, True),
    "2 fp16 parameters half streamed": (2, "fp16", 2, HALF, CPU | {"offload_param": HOST}, False),
    "2 low": (2, "low", 2, {}, CPU | {"offload_param": HOST}, False),
    "4 copies": (4, "fp32", 2, {}, CPU | {"mics_shard_size": 2}, False),
    "4 copies with room": (4, "bf16", 1, {}, CPU | {"mics_shard_size": 2}, True),
}
SHORT = ("1 fp16 parameters", "2 fp16 half streamed", "2 bf16 parameters streamed with room")


@pytest.mark.parametrize("name", choice(CASES, SHORT))
def test_bits_do_not_depend_on_where_sums_rest(world, name):
    ranks, *case, has_room = CASES[name]
    for is_same, different, units, most in world(ranks).run(both, *case, has_room=has_room):
        assert is_same
        assert different == []
        assert units > 4
        stays = has_room and ("several" in name or "streamed" in name or "copies" in name)
        assert (most == units) == stays
        assert most <= 3 or stays


def held():
    """Bytes on the device after a backward, and of the gradients, which are then away."""
    use_full_device()
    gc.collect()
    before, model = on_device(), Wide([])
    total = 4 * sum(p.numel() for p in model.parameters())
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **CPU, "offload_param": HOST}
    engine = mizzen.initialize(model=model, config=config(3, 1, zero=zero, train_batch_size=2))[0]
    rests = on_device() - before
    engine.backward(engine(torch.randn(2, 64)))
    for store in engine.stores:
        store.stock.drop_free()
    gc.collect()
    away = [unit.sums.is_away for unit in units_of(engine)]
    return total, rests, on_device() - before, away, engine.step().applied


def test_after_backward_the_device_holds_no_gradient(world):
    ((total, rests, after, away, applied),) = world(1).run(held)
    assert rests < total / 16
    assert after < total / 16
    assert all(away)
    assert applied


def looked_at(zero):
    """What is read of gradients between backward and step, and what is stepped with after one was written."""
    found = []
    for sections in ({}, zero):
        if sections:
            use_full_device()
        engine = start("bf16", **sections)
        weights = dict(engine.module.named_parameters())
        inputs = torch.ones(2, 8, dtype=torch.bfloat16)
        engine.backward(engine(inputs))
        trained = [name for name, each in weights.items() if "layers.2" not in name]
        seen = [mizzen.zero.safe_get_full_grad(weights[name]) for name in trained]
        own = mizzen.zero.safe_get_local_grad(weights["last.bias"])
        mizzen.zero.safe_set_full_grad(weights["layers.0.weight"], torch.full((8, 8), 2.0))
        away = all(unit.sums.is_away for unit in units_of(engine))
        report = engine.step()
        engine.backward(engine(inputs))
        engine.zero_grad()
        engine.backward(engine(inputs))
        norms = str(report.grad_norm), str(engine.step().grad_norm)
        found.append((seen, own, norms, left_of(engine), away))
        engine.destroy()
    return found


def test_gradients_are_read_and_written_where_they_rest(world):
    for first, second in world(2).run(looked_at, CPU | {"offload_param": HOST}):
        assert all(torch.equal(one, other) for one, other in zip(first[0], second[0], strict=True))
        assert torch.equal(first[1], second[1])
        assert first[2] == second[2]
        assert float(first[2][0]) > 15
        assert all(torch.equal(first[3][name], second[3][name]) for name in first[3])
        assert (first[4], second[4]) == (False, True)


def left_and_returned():
    """An engine leaves the device in the middle of an accumulation, while its sums rest in host memory."""
    found = []
    for is_away in (False, True):
        use_full_device()
        engine = start("bf16", accumulation=2, keys=HALF, **CPU)
        for number in range(6):
            seed = torch.Generator().manual_seed(10 * number + engine.global_rank)
            engine.backward(engine(torch.randn(2, 8, generator=seed).bfloat16()))
            if is_away and number in (2, 3):
                engine.offload_states()
                engine.reload_states()
            report = engine.step()
        found.append((str(report.grad_norm), left_of(engine)))
        engine.destroy()
    return found


def test_an_engine_may_leave_the_device_whose_sums_rest_elsewhere(world):
    for (norm, values), (other, after) in world(2).run(left_and_returned):
        assert norm == other
        assert all(torch.equal(values[name], after[name]) for name in values)
