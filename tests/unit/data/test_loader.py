"""The loader: epochs, positions that survive another number of ranks, iterables, workers that do not stay behind."""

import gc
import os
import random
import time

import numpy
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from mizzen.ambient import AMBIENT
from mizzen.data.loader import Loader, LoaderFactory
from mizzen.data.sampler import BatchShare, LoaderPosition
from mizzen.errors import CheckpointError, UsageError


def loader_of(dataset, micro=2, rank=0, ranks=1, accumulation=1, **arguments):
    return Loader(dataset, BatchShare(micro, rank, ranks, accumulation), **({"seed": 5} | arguments))


def numbers(batches):
    """What a loader gave, as lists."""
    return [batch.tolist() for batch in batches]


def flat(batches):
    return [number for batch in batches for number in batch.tolist()]


class Counting(IterableDataset):
    """0, 1, 2, ... up to a limit, and how many were asked for."""

    def __init__(self, limit):
        self.limit = limit
        self.read = 0
        self.epochs = []

    def __iter__(self):
        for number in range(self.limit):
            self.read += 1
            yield number

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Draws(Dataset):
    """Samples that are random numbers of every kind that a worker has."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(()).double(), random.random(), numpy.random.rand()


class Process(Dataset):
    """Which process made a sample."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return os.getpid()


class TestEpochs:
    def test_each_has_all_samples_in_another_order(self):
        loader = loader_of(range(20))
        first, second, third = (flat(loader) for _ in range(3))
        assert sorted(first) == sorted(second) == list(range(20))
        assert len({tuple(first), tuple(second), tuple(third)}) == 3

    def test_they_are_the_same_in_another_run_and_for_other_seeds_not(self):
        one, same, other = (loader_of(range(20), seed=seed) for seed in (1, 1, 2))
        assert [flat(one), flat(one)] == [flat(same), flat(same)]
        assert flat(one) != flat(other)

    def test_one_may_be_chosen(self):
        loader, other = loader_of(range(20)), loader_of(range(20))
        epochs = [flat(loader) for _ in range(4)]
        other.set_epoch(2)
        assert other.position == LoaderPosition(2, 0)
        assert [flat(other), flat(other)] == epochs[2:]
        other.set_epoch(1)
        assert flat(other) == epochs[1]

    def test_one_that_was_broken_off_is_not_resumed(self):
        loader, other = loader_of(range(20)), loader_of(range(20))
        epochs = [flat(loader) for _ in range(2)]
        next(iter(other))
        assert flat(other) == epochs[1]
        other.set_epoch(0)
        assert flat(other) == epochs[0]

    def test_without_shuffling_all_are_alike(self):
        loader = loader_of(range(5), shuffle=False, ending="short")
        assert numbers(loader) == numbers(loader) == [[0, 1], [2, 3], [4]]

    def test_length(self):
        assert len(loader_of(range(20), 2, 0, 2, 3)) == 6
        assert len(list(loader_of(range(20), 2, 0, 2, 3))) == 6
        assert len(loader_of(range(20), 2, 0, 2, 3, ending="drop")) == 3

    @pytest.mark.parametrize("dataset", [range(20), Counting(20)], ids=["indexed", "iterable"])
    def test_the_global_generator_is_left_alone(self, dataset):
        torch.manual_seed(0)
        state = torch.get_rng_state()
        assert len(list(loader_of(dataset))) == 10
        assert torch.equal(torch.get_rng_state(), state)

    def test_samples_are_collated_as_torch_does_or_as_told(self):
        dataset = TensorDataset(torch.arange(4), torch.arange(4) * 10)
        for first, second in loader_of(dataset):
            assert torch.equal(first * 10, second)
        assert list(loader_of(range(4), shuffle=False, collate_fn=tuple)) == [(0, 1), (2, 3)]

    def test_fewer_samples_than_a_batch(self):
        AMBIENT.warned.clear()
        assert sorted(flat(loader_of(range(3), 2, 0, 1, 2))) in ([0, 0, 1, 2], [0, 1, 1, 2], [0, 1, 2, 2])
        assert any("has 3 samples, fewer than one train batch (4 = micro 2" in text for text in AMBIENT.warned)
        with pytest.raises(
            UsageError, match="so an epoch has no step: lower the batch size or unset dataloader_drop_last"
        ):
            loader_of(range(3), 2, 0, 1, 2, ending="drop")
        with pytest.raises(UsageError, match="has 0 samples"):
            loader_of([])
        assert list(loader_of([], ending="short")) == []


class TestPosition:
    def test_it_counts_what_all_ranks_were_given(self):
        loader = loader_of(range(24), 2, 1, 3, 2)
        seen = [loader.position]
        for _ in loader:
            seen.append(loader.position)
        assert seen == [
            LoaderPosition(0, 0),
            LoaderPosition(0, 6),
            LoaderPosition(0, 12),
            LoaderPosition(0, 18),
            LoaderPosition(1, 0),
        ]
        assert loader.position == LoaderPosition(1, 0)

    @given(data=st.data(), size=st.integers(8, 40), ending=st.sampled_from(["wrap", "drop"]))
    @settings(max_examples=40)
    def test_the_rest_is_the_same_at_any_number_of_ranks(self, data, size, ending):
        """2 -> 1 -> 4 -> ..., each for a few steps; the samples are those of one unbroken run on one rank."""
        train, unbroken, found = 8, loader_of(range(size), 8, ending=ending), []
        expected = [sample for _ in range(4) for sample in flat(unbroken)]
        state = loader_of(range(size), 8, ending=ending).state_dict()
        while len(found) + train <= len(expected):
            ranks, micro = data.draw(st.sampled_from([(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (8, 1)]))
            accumulation = train // ranks // micro
            loaders = [
                loader_of(range(size), micro, rank, ranks, accumulation, ending=ending, seed=77 + rank)
                for rank in range(ranks)
            ]
            for loader in loaders:
                loader.load_state_dict(state)
            steps = data.draw(st.integers(1, 3))
            for number, batches in enumerate(zip(*loaders, strict=True), 1):
                found += flat(batches)
                if number == steps * accumulation:
                    break
            (state,) = {tuple(loader.state_dict().items()) for loader in loaders}
            state = dict(state)
        assert found == expected[: len(found)]

    def test_the_seed_travels_with_it(self):
        saved = loader_of(range(20), seed=1)
        iterator = iter(saved)
        next(iterator)
        loaded = loader_of(range(20), seed=2)
        loaded.load_state_dict(saved.state_dict())
        assert loaded.state_dict() == saved.state_dict() == {"epoch": 0, "samples": 2, "seed": 1, "size": 20}
        assert flat(loaded) == flat(iterator)
        assert flat(loaded) == flat(saved)

    def test_naming_the_loaded_epoch_keeps_the_place_in_it(self):
        loader, other = loader_of(range(20)), loader_of(range(20))
        first, second = flat(loader), flat(loader)
        for epoch, rest in ((0, first[4:]), (1, second)):
            other.load_state_dict({"epoch": 0, "samples": 4, "seed": 5, "size": 20})
            other.set_epoch(epoch)
            assert flat(other) == rest

    def test_naming_the_next_epoch_leaves_the_present_place(self):
        loader = loader_of(range(20))
        epochs = [flat(loader) for _ in range(5)]
        loader.set_epoch(1)
        for _ in loader:
            loader.set_epoch(4)
            assert loader.position == LoaderPosition(1, 2)
            break
        assert flat(loader) == epochs[4]

    def test_the_end_of_an_epoch_is_the_start_of_the_next(self):
        loader = loader_of(range(4))
        iterator = iter(loader)
        next(iterator), next(iterator)
        state = loader.state_dict()
        assert (state["epoch"], state["samples"]) == (1, 0)
        loaded = loader_of(range(4))
        loaded.load_state_dict(state | {"epoch": 0, "samples": 4})
        assert len(list(loaded)) == 2
        assert loaded.position == LoaderPosition(2, 0)

    def test_a_data_set_that_has_changed_is_told(self):
        AMBIENT.warned.clear()
        loader = loader_of(range(20))
        loader.load_state_dict({"epoch": 3, "samples": 0, "seed": 5, "size": 10})
        assert not AMBIENT.warned
        loader.load_state_dict({"epoch": 3, "samples": 4, "seed": 5, "size": 10})
        assert any("had 10 samples when its position was saved and has 20 now" in text for text in AMBIENT.warned)

    @pytest.mark.parametrize("wrong", [{"epoch": None}, {"samples": -1}, {"seed": "5"}, {"epoch": True}])
    def test_what_is_no_position(self, wrong):
        with pytest.raises(CheckpointError, match=f"the data position holds {next(iter(wrong))} = "):
            loader_of(range(4)).load_state_dict({"epoch": 0, "samples": 0, "seed": 5} | wrong)


class TestIterable:
    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_ranks_share_it_batch_by_batch(self, ranks):
        by_rank = [numbers(loader_of(Counting(12), 2, rank, ranks)) for rank in range(ranks)]
        rounds = [sum(batches, []) for batches in zip(*by_rank, strict=True)]
        assert sum(rounds, []) == list(range(12))

    def test_the_end_is_as_it_comes(self):
        assert [numbers(loader_of(Counting(7), 2, rank, 2)) for rank in (0, 1)] == [[[0, 1], [4, 5]], [[2, 3], [6]]]
        assert [numbers(loader_of(Counting(5), 2, rank, 2)) for rank in (0, 1)] == [[[0, 1], [4]], [[2, 3]]]
        assert numbers(loader_of(Counting(7), 2, 1, 2, ending="drop")) == [[2, 3]]

    @pytest.mark.parametrize("source", [lambda: Counting(6), lambda: iter(range(6)), lambda: (n for n in range(6))])
    def test_anything_that_can_be_iterated(self, source):
        assert numbers(loader_of(source())) == [[0, 1], [2, 3], [4, 5]]

    def test_it_goes_on_from_a_position_at_another_number_of_ranks(self):
        saved = [loader_of(Counting(24), 2, rank, 2) for rank in (0, 1)]
        for _, batches in zip(range(3), zip(*saved, strict=True), strict=False):
            last = flat(batches)
        assert last == [8, 9, 10, 11]
        loaded = [loader_of(Counting(24), 3, rank, 4) for rank in range(4)]
        for loader in loaded:
            loader.load_state_dict(saved[0].state_dict())
        assert sum((flat(batches) for batches in zip(*loaded, strict=True)), []) == list(range(12, 24))

    def test_it_is_told_the_epoch(self):
        dataset = Counting(4)
        loader = loader_of(dataset)
        list(loader), list(loader)
        assert dataset.epochs == [0, 1] and loader.position == LoaderPosition(2, 0)

    def test_no_more_is_read_than_is_needed(self):
        dataset = Counting(1000)
        next(iter(loader_of(dataset, 2, 0, 4)))
        assert dataset.read == 2

    def test_it_has_no_length(self):
        with pytest.raises(TypeError, match="Counting can only be iterated: its length is not known"):
            len(loader_of(Counting(4)))

    def test_one_that_shards_itself_is_left_alone(self):
        dataset = Counting(8)
        dataset.shards_itself = True
        loader = loader_of(dataset, 2, 1, 4)
        assert numbers(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        loader.load_state_dict({"epoch": 0, "samples": 16, "seed": 5, "size": None})
        assert numbers(loader) == [[4, 5], [6, 7]]
        dataset.shards_itself = False
        assert numbers(loader_of(dataset, 2, 1, 4)) == [[2, 3]]

    def test_what_is_neither_is_no_data_set(self):
        with pytest.raises(UsageError, match="int is no data set"):
            loader_of(3)


def children():
    return {process.pid for process in psutil.Process().children(recursive=True)}


def wait_until_gone(before):
    for _ in range(100):
        if children() <= before:
            return
        time.sleep(0.05)
    raise AssertionError(f"still there: {children() - before}")


class TestWorkers:
    def test_they_do_the_work_in_the_same_order(self):
        assert numbers(loader_of(range(10), workers=2)) == numbers(loader_of(range(10)))
        assert os.getpid() not in flat(loader_of(Process(), workers=2))

    def test_the_position_is_what_was_handed_out(self):
        loader = loader_of(range(40), workers=2)
        iterator = iter(loader)
        handed_out = flat([next(iterator), next(iterator)])
        assert loader.position == LoaderPosition(0, 4)
        loaded = loader_of(range(40), workers=0)
        loaded.load_state_dict(loader.state_dict())
        assert sorted(handed_out + flat(loaded)) == list(range(40))
        loader.close()

    @pytest.mark.parametrize("leave", ["break", "close", "end", "error"])
    def test_they_do_not_stay_behind(self, leave):
        before = children()
        loader = loader_of(range(40), workers=2)
        if leave == "break":
            for _ in loader:
                assert len(children() - before) == 2
                break
        elif leave == "close":
            iterator = iter(loader)
            next(iterator)
            assert len(children() - before) == 2
            loader.close()
            assert next(iterator, None) is None
        elif leave == "end":
            assert len(list(loader)) == 20
        else:
            with pytest.raises(ZeroDivisionError):
                for _ in loader:
                    1 / 0  # noqa: B018
        gc.collect()
        wait_until_gone(before)

    def test_their_seeds_come_from_seed_epoch_and_rank(self):
        def drawn(seed=1, epoch=0, rank=0):
            loader = loader_of(Draws(), 2, rank, 2, seed=seed, workers=1, shuffle=False)
            loader.set_epoch(epoch)
            return torch.stack([value for batch in loader for value in batch])

        assert torch.equal(drawn(), drawn())
        for other in (drawn(seed=2), drawn(epoch=1), drawn(rank=1)):
            assert (drawn() != other).any(dim=1).all()

    def test_an_iterable_is_read_by_one(self):
        assert numbers(loader_of(Counting(8), 2, 1, 2, workers=3)) == [[2, 3], [6, 7]]

    def test_one_that_shards_itself_has_all_of_them(self):
        class ByWorker(Counting):
            shards_itself = True

            def __iter__(self):
                worker = torch.utils.data.get_worker_info()
                return iter(range(worker.id * 100, worker.id * 100 + 4))

        loader = loader_of(ByWorker(4), workers=2)
        whole = [[0, 1], [100, 101], [2, 3], [102, 103]]
        assert numbers(loader) == whole
        loader.load_state_dict({"epoch": 0, "samples": 4, "seed": 5, "size": None})
        assert numbers(loader) == whole[2:]


class TestFactory:
    def test_training_data_is_shuffled_and_wraps(self):
        loader = LoaderFactory(seed=3, rank=1, ranks=2, accumulation=2)(range(10), batch_size=2)
        assert (loader.share, loader.shuffle, loader.ending) == (BatchShare(2, 1, 2, 2), True, "wrap")
        assert loader.batch_size == 2 and loader.state_dict()["seed"] == 3

    def test_or_drops(self):
        assert LoaderFactory(seed=3, drop_last=True)(range(10), batch_size=2).ending == "drop"

    @pytest.mark.parametrize("route", ["eval", "predict"])
    @pytest.mark.parametrize("drop_last", [True, False])
    def test_other_routes_keep_order_and_count(self, route, drop_last):
        loaders = [
            LoaderFactory(seed=3, rank=rank, ranks=2, accumulation=4, drop_last=drop_last)(
                range(7), batch_size=2, route=route
            )
            for rank in (0, 1)
        ]
        assert [numbers(loader) for loader in loaders] == [[[0, 1], [4, 5]], [[2, 3], [6]]]

    def test_another_route_is_refused(self):
        with pytest.raises(UsageError, match="route 'test' is not one of train, eval, predict"):
            LoaderFactory(seed=3)(range(7), batch_size=2, route="test")

    @pytest.mark.parametrize(
        ("device", "asked", "workers"), [("cpu", None, 0), ("cpu", 1, 1), ("cuda", None, 2), ("cuda", 0, 0)]
    )
    def test_workers(self, device, asked, workers):
        loader = LoaderFactory(seed=3, device_type=device)(range(8), batch_size=2, workers=asked)
        assert loader._torch_loader(LoaderPosition()).num_workers == workers

    @pytest.mark.parametrize(
        ("device", "asked", "pinned"),
        [("cpu", True, False), ("mps", True, False), ("cuda", True, True), ("cuda", False, False)],
    )
    def test_pinning(self, device, asked, pinned):
        factory = LoaderFactory(seed=3, device_type=device)
        assert factory(range(8), batch_size=2, pin_memory=asked)._torch_loader(LoaderPosition()).pin_memory == pinned
        own = factory(range(8), batch_size=2, pin_memory=asked, sampler=SequentialSampler(range(8)))
        assert own.pin_memory == pinned

    def test_a_sampler_of_the_users_is_used_as_it_is(self):
        factory = LoaderFactory(seed=3, rank=1, ranks=2, drop_last=True)
        assert numbers(factory(range(5), batch_size=2, sampler=[4, 2, 0])) == [[4, 2]]
        batches = BatchSampler(SequentialSampler(range(5)), 3, drop_last=False)
        assert numbers(factory(range(5), batch_size=2, sampler=batches)) == [[0, 1, 2], [3, 4]]
        assert list(factory(range(2), batch_size=2, sampler=[1, 0], collate_fn=tuple)) == [(1, 0)]

    def test_so_is_a_loader(self):
        own = DataLoader(range(4))
        assert LoaderFactory(seed=3)(own, batch_size=2) is own


class TestGiven:
    """A DataLoader as training data: each rank gets its own part, or a word that it does not."""

    @pytest.fixture(autouse=True)
    def heard(self, monkeypatch):
        monkeypatch.setattr(AMBIENT, "warned", set())

    def shared(self, ranks=2, micro=2, **arguments):
        """What each rank gets of a DataLoader with these arguments, and what was said."""
        factories = [LoaderFactory(seed=3, rank=rank, ranks=ranks) for rank in range(ranks)]
        given = DataLoader(batch_size=micro, **arguments)
        return [numbers(factory(given, batch_size=micro)) for factory in factories], " ".join(AMBIENT.warned)

    def test_one_in_order_is_shared_out(self):
        assert self.shared(dataset=range(8)) == ([[[0, 1], [4, 5]], [[2, 3], [6, 7]]], "")

    @pytest.mark.parametrize(("drop_last", "batches"), [(False, 3), (True, 2)])
    def test_a_shuffled_one_gives_every_sample_once(self, drop_last, batches):
        (first, second), said = self.shared(dataset=range(10), shuffle=True, drop_last=drop_last)
        seen = [*sum(first, []), *sum(second, [])]
        assert len(first) == len(second) == batches and said == ""
        assert len(set(seen)) == (10 if not drop_last else 8) and seen != sorted(seen)

    def test_it_keeps_collation_workers_and_batch_size(self):
        given = DataLoader(range(12), batch_size=3, collate_fn=tuple, num_workers=1, prefetch_factor=4)
        loader = LoaderFactory(seed=3, rank=1, ranks=2)(given, batch_size=2)
        assert list(loader) == [(3, 4, 5), (9, 10, 11)]
        made = loader._torch_loader(LoaderPosition())
        assert (made.num_workers, made.prefetch_factor) == (1, 4)
        assert any("has batches of 3" in words and "= 2" in words for words in AMBIENT.warned)

    def test_for_evaluation_nothing_is_repeated(self):
        given = DataLoader(range(5), batch_size=2)
        found = [LoaderFactory(seed=3, rank=r, ranks=2)(given, batch_size=2, route="eval") for r in range(2)]
        assert [numbers(each) for each in found] == [[[0, 1], [4]], [[2, 3]]]

    def test_a_subset_is_shared_out(self):
        (first, second), _ = self.shared(dataset=range(10), sampler=SubsetRandomSampler([1, 3, 5, 7]))
        assert sorted(sum(first, []) + sum(second, [])) == [1, 3, 5, 7]

    def test_an_iterable_is_shared_out_and_told_of(self):
        found, said = self.shared(dataset=Counting(8))
        assert found == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]] and "shards_itself" in said

    def test_one_whose_sampler_knows_of_ranks_is_used_as_it_is(self):
        sampler = DistributedSampler(range(8), num_replicas=2, rank=1, shuffle=False)
        given = DataLoader(range(8), batch_size=2, sampler=sampler)
        assert LoaderFactory(seed=3, rank=1, ranks=2)(given, batch_size=2) is given and not AMBIENT.warned
        batches = DataLoader(range(8), batch_sampler=BatchSampler(sampler, 2, drop_last=False))
        assert LoaderFactory(seed=3, rank=1, ranks=2)(batches, batch_size=2) is batches and not AMBIENT.warned
        with pytest.raises(UsageError, match="part 1 of 2.*rank 0 of 4"):
            LoaderFactory(seed=3, rank=0, ranks=4)(given, batch_size=2)

    @pytest.mark.parametrize(
        "arguments",
        [
            {"batch_sampler": [[0, 1], [2, 3]]},
            {"sampler": WeightedRandomSampler([1.0] * 4, 4), "batch_size": 2},
            {"sampler": RandomSampler(range(4), replacement=True), "batch_size": 2},
            {"batch_size": None},
        ],
        ids=["batches", "weights", "replacement", "no batches"],
    )
    def test_what_cannot_be_shared_out_is_told_of(self, arguments):
        given = DataLoader(range(4), **arguments)
        assert LoaderFactory(seed=3, rank=1, ranks=2)(given, batch_size=2) is given
        assert any("all train on the same" in words for words in AMBIENT.warned)
