"""The samples of every step, and what is left after any of them, do not depend on how many ranks there are."""

from itertools import product

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mizzen.data.sampler import BatchShare, MicroBatches, derive_seed, epoch_order
from mizzen.errors import UsageError


def splits(train):
    """Every (micro, ranks, accumulation) whose product is the train batch size."""
    return [split for split in product(range(1, train + 1), repeat=3) if split[0] * split[1] * split[2] == train]


def steps_of(order, split, *, start=0, ending="wrap"):
    """The samples of each step in global order, put together from what every rank gets."""
    micro, ranks, accumulation = split
    shares = [BatchShare(micro, rank, ranks, accumulation) for rank in range(ranks)]
    by_rank = [list(MicroBatches(order, share, start=start, ending=ending)) for share in shares]
    assert len({len(batches) for batches in by_rank}) == 1, "ranks get a different number of micro-batches"
    rounds = [[sample for batches in by_rank for sample in batches[number]] for number in range(len(by_rank[0]))]
    return [sum(rounds[first : first + accumulation], []) for first in range(0, len(rounds), accumulation)]


class TestOrder:
    def test_a_permutation_of_all(self):
        assert sorted(epoch_order(100, seed=1, epoch=2).tolist()) == list(range(100))

    def test_it_depends_on_seed_and_epoch_and_nothing_else(self):
        orders = {
            (seed, epoch): tuple(epoch_order(50, seed=seed, epoch=epoch)) for seed in range(4) for epoch in range(4)
        }
        assert len({tuple(map(int, order)) for order in orders.values()}) == 16
        torch.manual_seed(7)
        state = torch.get_rng_state()
        assert torch.equal(epoch_order(50, seed=1, epoch=2), epoch_order(50, seed=1, epoch=2))
        assert torch.equal(torch.get_rng_state(), state)

    def test_it_is_the_same_in_every_version(self):
        """A run that is resumed after an update must go on in the order it began with."""
        assert epoch_order(10, seed=0, epoch=0).tolist() == [3, 0, 7, 4, 6, 8, 1, 5, 9, 2]
        assert derive_seed("order", 0, 0) == 4876581156571347824

    @given(st.lists(st.integers(0, 2**64), max_size=3), st.lists(st.integers(0, 2**64), max_size=3))
    def test_seeds_for_different_purposes_differ(self, one, other):
        assume(one != other)
        assert derive_seed(*one) != derive_seed(*other)
        assert 0 <= derive_seed(*one) < 2**63


class TestSteps:
    @given(size=st.integers(1, 80), train=st.sampled_from([1, 4, 6, 8, 12]), data=st.data())
    def test_every_split_gives_the_same_steps(self, size, train, data):
        order = epoch_order(size, seed=3, epoch=1)
        ending = data.draw(st.sampled_from(["wrap", "drop"]))
        split = data.draw(st.sampled_from(splits(train)))
        places = size // train * train if ending == "drop" else -(-size // train) * train
        expected = [order[torch.arange(first, first + train) % size].tolist() for first in range(0, places, train)]
        assert steps_of(order, split, ending=ending) == expected

    @given(size=st.integers(1, 80), train=st.sampled_from([4, 6, 12]), data=st.data())
    def test_what_is_left_after_a_step_is_the_same_at_any_other_split(self, size, train, data):
        order = epoch_order(size, seed=3, epoch=1)
        ending = data.draw(st.sampled_from(["wrap", "drop"]))
        before, after = data.draw(st.sampled_from(splits(train))), data.draw(st.sampled_from(splits(train)))
        steps = steps_of(order, before, ending=ending)
        done = data.draw(st.integers(0, len(steps)))
        assert steps_of(order, after, start=done * train, ending=ending) == steps[done:]

    @given(size=st.integers(1, 80), split=st.sampled_from(splits(12)), data=st.data())
    def test_the_same_split_goes_on_inside_a_step(self, size, split, data):
        order = epoch_order(size, seed=3, epoch=1)
        micro, ranks, accumulation = split
        share = BatchShare(micro, ranks - 1, ranks, accumulation)
        whole = list(MicroBatches(order, share))
        done = data.draw(st.integers(0, len(whole)))
        assert list(MicroBatches(order, share, start=done * share.round)) == whole[done:]

    def test_other_splits_go_on_after_an_incomplete_step_with_whole_rounds(self):
        """Saved after 2 of 12 places: nothing is lost, nothing comes twice, and all ranks get as many."""
        order = torch.arange(24)
        steps = steps_of(order, (2, 3, 2), start=2)
        assert sum(steps, []) == [*range(2, 24), 0, 1]
        assert sum(steps_of(order, (2, 3, 2), start=2, ending="drop"), []) == [*range(2, 20)]

    def test_how_a_step_is_split(self):
        order, split = torch.arange(16), BatchShare(micro=2, rank=1, ranks=2, accumulation=2)
        assert list(MicroBatches(order, split)) == [[2, 3], [6, 7], [10, 11], [14, 15]]
        assert (split.round, split.step) == (4, 8)


class TestEnding:
    def test_wrap_fills_the_last_step_from_the_beginning(self):
        assert steps_of(torch.arange(10), (2, 2, 1)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
        assert steps_of(torch.arange(3), (4, 2, 1)) == [[0, 1, 2, 0, 1, 2, 0, 1]]

    def test_drop_leaves_it_out(self):
        assert steps_of(torch.arange(10), (2, 2, 1), ending="drop") == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert steps_of(torch.arange(3), (4, 2, 1), ending="drop") == []

    @given(size=st.integers(0, 40), micro=st.integers(1, 4), ranks=st.integers(1, 4), data=st.data())
    def test_short_hands_out_each_sample_once(self, size, micro, ranks, data):
        start = micro * ranks * data.draw(st.integers(0, 3))
        samplers = [
            MicroBatches(torch.arange(size), BatchShare(micro, rank, ranks), start=start, ending="short")
            for rank in range(ranks)
        ]
        by_rank = [list(sampler) for sampler in samplers]
        assert [len(batches) for batches in by_rank] == [len(sampler) for sampler in samplers]
        assert sorted(sample for batches in by_rank for batch in batches for sample in batch) == [*range(start, size)]
        assert all(batches and all(batches) for batches in by_rank if batches)
        assert max(map(len, by_rank)) - min(map(len, by_rank)) <= 1

    @pytest.mark.parametrize("ending", ["wrap", "drop", "short"])
    def test_nothing_is_left_after_the_end(self, ending):
        share = BatchShare(2, 1, 2, 2)
        assert share.micro_batches(10, 16, ending) == share.micro_batches(10, 99, ending) == 0
        assert share.micro_batches(0, 0, ending) == 0


@pytest.mark.parametrize("share", [(0,), (2, 2, 2), (2, -1, 2), (2, 0, 1, 0)])
def test_what_is_no_share(share):
    with pytest.raises(UsageError, match="is no share of a batch"):
        BatchShare(*share)
