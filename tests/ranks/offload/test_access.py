"""What rests in host memory is read, written, saved and loaded as what rests on the device is."""

import threading
from pathlib import Path

import pytest
import torch

import mizzen
from behind import use_behind
from breadth import choice
from mizzen.checkpoint import save as protocol
from mizzen.model.piece import Readers
from ranks.offload.test_step import Model, left_of, places, start, train


def written(stage, offload):
    use_behind()
    engine = start(stage, "bf16", offload=offload)
    train(engine, "bf16", steps=3)
    weight = engine.module.layers[0].weight
    value = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    mizzen.zero.safe_set_full_fp32_param(weight, value)
    mizzen.zero.safe_set_full_optimizer_state(weight, value * 2, "exp_avg")
    found = mizzen.zero.safe_get_full_fp32_param(weight), mizzen.zero.safe_get_full_optimizer_state(weight, "exp_avg")
    with mizzen.zero.GatheredParameters(weight):
        seen = weight.detach().clone()
    other = engine.module.layers[1].weight
    with mizzen.zero.GatheredParameters(other, modifier_rank=0), torch.no_grad():
        other.fill_(0.25)
    changed = mizzen.zero.safe_get_full_fp32_param(other)
    return set(places(engine)), value, found, seen, changed


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_values_and_states_are_read_and_written_where_they_rest(world, stage, place, tmp_path):
    offload = {"device": {"host": "cpu"}.get(place, place), "nvme_path": str(tmp_path)}
    for rests, value, (master, state), seen, changed in world(2).run(written, stage, offload):
        assert rests == {place}
        assert torch.equal(master, value)
        assert torch.equal(state, value * 2)
        assert torch.equal(seen, value.to(torch.bfloat16))
        assert torch.equal(changed.to(torch.bfloat16), torch.full((8, 8), 0.25, dtype=torch.bfloat16))


def resumed(stage, folder):
    """Save from files; load it there, in host memory, and where states rest on the device."""
    use_behind()
    nvme = {"device": "nvme", "nvme_path": f"{folder}/swap"}
    engine = start(stage, "bf16", offload=nvme)
    train(engine, "bf16", steps=3)
    engine.save_checkpoint(folder)
    told, left = train(engine, "bf16", steps=3), left_of(engine)
    engine.destroy()
    found = []
    for offload in (nvme, {"device": "cpu"}, None):
        other = start(stage, "bf16", offload=offload)
        other.load_checkpoint(folder)
        same = train(other, "bf16", steps=3) == told
        values = left_of(other)
        found.append((same, [name for name in left if not torch.equal(values[name], left[name])]))
        other.destroy()
    return found


@pytest.mark.parametrize("stage", choice([1, 3], [3]))
def test_a_checkpoint_does_not_know_where_states_rested(world, stage, tmp_path):
    for found in world(2).run(resumed, stage, str(tmp_path)):
        assert found == [(True, [])] * 3


def given(kind, is_away):
    """An optimizer that a client makes, such as DeepSpeedCPUAdam is."""
    if is_away:
        use_behind()
    model = Model()
    zero = {"stage": 2, "reduce_bucket_size": 80} | ({"offload_optimizer": {"device": "cpu"}} if is_away else {})
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "progress": {"enabled": False}}
    optimizer = kind(model.parameters(), lr=0.01)
    engine = mizzen.initialize(model=model, optimizer=optimizer, config=config)[0]
    return set(places(engine)), train(engine, "fp32", steps=5), left_of(engine)


def test_an_optimizer_that_a_client_gives(world):
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        here, away = world(2).each(given, [(kind, False), (kind, True)])
        for (rests, told, left), (_, expected, others) in zip(away, here, strict=True):
            assert rests == {"host"}
            assert told == expected
            assert all(torch.equal(left[name], others[name]) for name in others)


def refused():
    use_behind()
    with pytest.raises(mizzen.errors.UsageError, match="Lamb adds up .*: its states cannot rest outside the device"):
        start(1, "fp32", "Lamb", offload={"device": "cpu"})
    return True


def test_a_rule_over_all_parameters_is_refused(world):
    assert world(1).run(refused) == [True]


def without_its_file(folder):
    """What a step says whose states somebody has removed, and whether the folder is gone in the end."""
    engine = start(2, "bf16", offload={"device": "nvme", "nvme_path": folder})
    train(engine, "bf16", steps=2)
    (file,) = Path(folder).glob("mizzen-swap-*/states")
    file.unlink()
    with pytest.raises(mizzen.errors.FileError) as caught:
        train(engine, "bf16", steps=2)
    engine.destroy()
    return str(caught.value), list(Path(folder).iterdir())


def test_a_file_that_somebody_removed_is_named(world, tmp_path):
    ((said, left),) = world(1).run(without_its_file, str(tmp_path))
    assert "states" in said
    assert "on NVMe" in said or "from NVMe" in said or "to NVMe" in said
    assert left == []


def saved_beside(stage, place, folder):
    """A save whose thread writes nothing before a step waits for it, then another that nobody waits for."""
    use_behind()
    offload = {"device": place, "nvme_path": f"{folder}/swap", "ratio": 0.7}
    engine = start(stage, "bf16", offload=offload)
    train(engine, "bf16", steps=3)
    left, gate, copied = left_of(engine), threading.Event(), []
    wait, write, copy = Readers.wait, protocol.write_items, protocol.Staging._copied

    def wait_and_tell(readers):
        if readers._count:
            gate.set()
        wait(readers)

    def write_late(*args, **kwargs):
        gate.wait()
        return write(*args, **kwargs)

    def copy_and_tell(staging, number, item, *rest):
        copied.append((item.kind, item.piece.numel))
        return copy(staging, number, item, *rest)

    Readers.wait, protocol.write_items, protocol.Staging._copied = wait_and_tell, write_late, copy_and_tell
    engine.save_checkpoint(folder, tag="beside", async_save=True)
    train(engine, "bf16", steps=2)
    has_waited = gate.is_set()
    gate.set()
    engine.finish_saving()
    after = left_of(engine)
    engine.save_checkpoint(folder, tag="last", async_save=True)
    engine.destroy()
    different = []
    for tag, values in (("beside", left), ("last", after)):
        other = start(stage, "bf16")
        other.load_checkpoint(folder, tag=tag)
        found = left_of(other)
        different += [name for name in values if not torch.equal(found[name], values[name])]
        other.destroy()
    total = sum(value.numel() for name, value in left.items())
    return has_waited, different, sum(count for kind, count in copied if kind != "rng"), total


@pytest.mark.parametrize(("stage", "place"), choice([(1, "nvme"), (2, "cpu"), (3, "nvme"), (3, "cpu")], [(1, "nvme")]))
def test_a_save_beside_training_reads_where_states_rest(world, stage, place, tmp_path):
    for has_waited, different, copied, total in world(2).run(saved_beside, stage, place, str(tmp_path)):
        assert has_waited
        assert different == []
        assert copied < total  # two saves of what rests on the device: 30 % of a half


def failing_beside(folder):
    """A save that fails lets training go on."""
    use_behind()
    engine = start(2, "bf16", offload={"device": "cpu"})
    train(engine, "bf16", steps=1)

    def fail(*args, **kwargs):
        raise mizzen.errors.CheckpointError("the disk is gone")

    protocol.write_items = fail
    engine.save_checkpoint(folder, async_save=True)
    with pytest.raises(mizzen.errors.CheckpointError, match="the disk is gone"):
        engine.finish_saving()
    return [applied for applied, *_ in train(engine, "bf16", steps=2)]


def test_a_save_that_fails_holds_nothing_back(world, tmp_path):
    assert world(1).run(failing_beside, str(tmp_path)) == [[True, True]]
