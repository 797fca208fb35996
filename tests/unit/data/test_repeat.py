"""A loader that starts again when it ends."""

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from mizzen.data.loader import Loader, RepeatingLoader
from mizzen.data.sampler import BatchShare, LoaderPosition


def ours(dataset=range(6), **arguments):
    return Loader(dataset, BatchShare(2), seed=1, **arguments)


def flat(batches):
    return [number for batch in batches for number in batch.tolist()]


def test_epoch_after_epoch_each_in_its_own_order():
    loader = ours()
    epochs = [flat(loader) for _ in range(3)]
    assert flat(islice(RepeatingLoader(ours()), 9)) == sum(epochs, [])


def test_it_is_its_own_iterator():
    repeating = RepeatingLoader([1, 2])
    assert iter(repeating) is repeating
    assert [next(repeating) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert len(repeating) == 2


def test_the_position_is_that_of_the_loader():
    loader = ours()
    repeating = RepeatingLoader(loader)
    for _ in range(4):
        next(repeating)
    assert loader.position == LoaderPosition(1, 2)
    loaded = ours()
    loaded.load_state_dict(loader.state_dict())
    assert flat(islice(RepeatingLoader(loaded), 5)) == flat(islice(repeating, 5))


def test_an_epoch_may_be_chosen():
    loader = ours()
    epochs = [flat(loader) for _ in range(4)]
    repeating = RepeatingLoader(ours())
    repeating.set_epoch(2)
    assert flat(islice(repeating, 6)) == epochs[2] + epochs[3]


def test_a_distributed_sampler_is_told_of_every_epoch():
    def repeating():
        sampler = DistributedSampler(range(8), num_replicas=1, rank=0, seed=3)
        return RepeatingLoader(DataLoader(range(8), batch_size=4, sampler=sampler))

    batches = flat(islice(repeating(), 8))
    epochs = [batches[first : first + 8] for first in range(0, 32, 8)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    chosen = repeating()
    chosen.set_epoch(2)
    first = next(chosen)
    chosen.set_epoch(1)  # from the next start on
    assert flat([first, *islice(chosen, 5)]) == epochs[2] + epochs[1] + epochs[2]


@pytest.mark.parametrize("empty", [[], DataLoader(torch.zeros(0)), ours([], ending="short")])
def test_an_empty_one_ends(empty):
    repeating = RepeatingLoader(empty)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(repeating)


def test_one_empty_epoch_does_not_end_it():
    """The position of an iterable can be its end, which only iterating finds."""

    class Numbers:
        def __iter__(self):
            return iter(range(4))

    loader = ours(Numbers())
    loader.load_state_dict({"epoch": 0, "samples": 4, "seed": 1, "size": None})
    assert flat(islice(RepeatingLoader(loader), 2)) == [0, 1, 2, 3]
