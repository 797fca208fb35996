"""A proof that parameters can rest elsewhere: shards in files, fetched one unit ahead, by the gathers themselves.

This is the ground on which parameter offload will be built (docs/decisions/0010); nothing of it is in the library.
"""

from pathlib import Path

import torch

from mizzen.zero import safe_get_full_fp32_param
from ranks.parallel.zero.full.models import rows, start


class Resting:
    """Keeps the shards of a unit and its neighbours in memory, and those of all others in files."""

    def __init__(self, store, folder):
        self.units = [unit for unit in store.units if unit.plan.path]
        store.runtime.following = {key: found[:1] for key, found in store.runtime.following.items()}
        self.folder = Path(folder) / str(torch.distributed.get_rank())
        self.folder.mkdir()
        self.most = 0
        for number, unit in enumerate(self.units):
            unit.fetch = lambda number=number: self.keep((number - 1, number, number + 1))
        self.keep(())

    def keep(self, numbers):
        for number, unit in enumerate(self.units):
            is_sent = bool(unit._coming)  # a gather that is under way may still read the shard
            for place, share in enumerate(unit.shares):
                self.bring(share, number, place, is_here=number in numbers or is_sent)
        self.most = max(self.most, self.resident)

    def bring(self, share, number, place, *, is_here):
        storage, path = share.master.untyped_storage(), self.folder / f"{number}-{place}"
        size = share.master.numel() * share.master.element_size()
        if is_here and not storage.nbytes():
            storage.resize_(size)
            share.master.copy_(torch.from_file(str(path), size=share.master.numel(), dtype=share.master.dtype))
        elif not is_here and storage.nbytes():
            path.write_bytes(bytes(storage))
            storage.resize_(0)

    @property
    def resident(self):
        return sum(share.master.untyped_storage().nbytes() for unit in self.units for share in unit.shares)


def run(folder, keys):
    engine = start("Long", 3, **keys)
    resting = Resting(engine.stores[0], folder) if folder else None
    losses = []
    everything = range(8)
    for step in range(4):
        data = rows(step, engine.global_rank).to(torch.bfloat16 if keys else torch.float32)
        if resting:
            resting.keep((0,))
        loss = engine(data)
        engine.backward(loss)
        if resting:
            resting.keep(everything)  # the step would go unit by unit
        losses.append(engine.step().loss)
    return losses, [safe_get_full_fp32_param(p) for p in engine.module.parameters()]


def test_shards_that_rest_in_files_train_alike(world, tmp_path):
    for keys in ({}, {"bf16": {"enabled": True}}):
        folder = tmp_path / ("low" if keys else "full")
        folder.mkdir()
        expected, found = world(2).run(run, None, keys), world(2).run(run, str(folder), keys)
        for (losses, values), (their_losses, others) in zip(found, expected, strict=True):
            assert losses == their_losses
            assert all(torch.equal(one, other) for one, other in zip(values, others, strict=True))


def peak(folder):
    engine = start("Long", 3)
    resting = Resting(engine.stores[0], folder)
    total = sum(share.master.numel() * 4 for unit in resting.units for share in unit.shares)
    resting.most = 0
    with torch.no_grad():
        resting.keep((0,))
        engine(rows(0, engine.global_rank))
    return resting.most, total


def test_only_neighbours_are_in_memory(world, tmp_path):
    for most, total in world(2).run(peak, str(tmp_path)):
        assert most <= total * 3 / 8
