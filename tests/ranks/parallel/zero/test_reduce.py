"""Sums of one bucket over ranks: their values, their bits, their dtypes, and rows instead of tables."""

import operator
from functools import reduce

import pytest
import torch
import torch.distributed as dist

from mizzen.comm import collectives
from mizzen.parallel.zero.reduce import Reducer, Reduction, sum_of_rows
from mizzen.parallel.zero.stock import Stock

CPU = torch.device("cpu")

SIZE = 512


def values(rank, size=SIZE):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def in_rank_order(ranks):
    return reduce(operator.add, (values(rank) for rank in range(ranks)))


def sums(dtype=None, before=1.0, after=1.0, ordered=False):
    """to_all, to_owner, and to_owner added to ones, of one bucket; the bucket of the second must not change."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    reducer = Reducer(Reduction(ranks, dtype, before, after, ordered), dist.group.WORLD, Stock(CPU))
    to_all, bucket = values(rank), values(rank)
    reducer.to_all(to_all)()
    chunk, added = torch.full((SIZE // ranks,), 7.0), torch.ones(SIZE // ranks)
    reducer.to_owner(bucket, chunk, add=False)()
    reducer.to_owner(bucket, added, add=True)()
    assert torch.equal(bucket, values(rank))
    return to_all, chunk, added


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("ordered", [False, True])
def test_every_rank_or_the_owner_gets_the_sum(world, ranks, ordered):
    expected = in_rank_order(ranks)
    for rank, (to_all, chunk, added) in enumerate(world(ranks).run(sums, ordered=ordered)):
        mine = expected.chunk(ranks)[rank]
        torch.testing.assert_close(to_all, expected)
        assert torch.equal(chunk, mine)
        torch.testing.assert_close(added, mine + 1)
        if ordered:
            assert torch.equal(to_all, expected)


def given_to_others():
    """The elements that to_owner hands to an exchange, and those that it receives."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    reducer = Reducer(Reduction(ranks), dist.group.WORLD, Stock(CPU))
    exchange, counts = collectives.all_to_all_single, []

    def counting(received, sent, *sizes, **options):
        counts.append((sent.numel(), received.numel()))
        return exchange(received, sent, *sizes, **options)

    collectives.all_to_all_single = counting
    reducer.to_owner(values(rank), torch.empty(SIZE // ranks), add=False)()
    return counts


def test_two_ranks_keep_what_is_their_own(world):
    assert world(2).run(given_to_others) == [[(SIZE // 2, SIZE // 2)]] * 2


def test_a_row_that_is_in_its_place_is_not_copied():
    row = torch.ones(4)
    version = row._version
    assert sum_of_rows([row], into=row[:]).data_ptr() == row.data_ptr()
    assert row._version == version


class Away(torch.Tensor):
    """A tensor that says to be on a device, where a reduce-scatter is one collective."""

    device = torch.device("cuda")


def as_on_a_device(after):
    """to_owner of such a bucket, put and added; and whether the sum came straight to its place each time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    reducer = Reducer(Reduction(ranks, after=after), dist.group.WORLD, Stock(CPU))
    scatter, outputs = collectives.reduce_scatter_tensor, []

    def watched(output, sent, **options):
        outputs.append(output)
        return scatter(output, sent, **options)

    collectives.reduce_scatter_tensor = watched
    chunk, added = torch.full((SIZE // ranks,), 7.0), torch.ones(SIZE // ranks)
    reducer.to_owner(values(rank).as_subclass(Away), chunk, add=False)()
    reducer.to_owner(values(rank).as_subclass(Away), added, add=True)()
    return chunk, added.as_subclass(torch.Tensor), [outputs[0] is chunk, outputs[1] is added]


@pytest.mark.parametrize("after", [1.0, 0.5])
def test_on_a_device_a_sum_comes_straight_to_its_place(world, after):
    expected = in_rank_order(2) * after
    for rank, (chunk, added, straight) in enumerate(world(2).run(as_on_a_device, after)):
        torch.testing.assert_close(chunk, expected.chunk(2)[rank])
        torch.testing.assert_close(added, expected.chunk(2)[rank] + 1)
        assert straight == [True, False]


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.25), (0.25, 1.0), (0.5, 0.5)])
def test_both_factors_make_the_mean(world, before, after):
    expected = in_rank_order(4) / 4
    for rank, (to_all, chunk, added) in enumerate(world(4).run(sums, None, before, after)):
        torch.testing.assert_close(to_all, expected)
        torch.testing.assert_close(chunk, expected.chunk(4)[rank])
        torch.testing.assert_close(added, expected.chunk(4)[rank] + 1)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.1), ("float16", 0.01)])
@pytest.mark.parametrize("ordered", [False, True])
def test_fewer_bits_on_the_wire(world, dtype, tolerance, ordered):
    expected = in_rank_order(2) / 2
    for rank, (to_all, chunk, _) in enumerate(world(2).run(sums, dtype, 1.0, 0.5, ordered)):
        assert to_all.dtype == chunk.dtype == torch.float32
        torch.testing.assert_close(to_all, expected, rtol=tolerance, atol=tolerance)
        assert not torch.equal(to_all, expected)
        assert torch.equal(chunk, to_all.chunk(2)[rank])  # two ranks: there is one order


def large_values(before):
    """Beyond fp16 on one rank, within it once its part of the mean is taken."""
    bucket = torch.full((64,), 1e5 if dist.get_rank() == 0 else 0.0)
    Reducer(Reduction(4, "float16", before, 1 / (4 * before)), dist.group.WORLD, Stock(CPU)).to_all(bucket)()
    return bucket[0].item()


def test_a_factor_before_the_sum_keeps_it_within_the_dtype(world):
    assert world(4).run(large_values, 0.25) == [pytest.approx(2.5e4, rel=1e-3)] * 4
    assert world(4).run(large_values, 1.0) == [float("inf")] * 4


def low_buckets(ordered):
    """fp16 gradients whose sum is beyond fp16 and whose mean is not: all, the owner's, and one added to the owner's."""
    reducer = Reducer(Reduction(4, None, 1.0, 0.25, ordered), dist.group.WORLD, Stock(CPU))
    found = []
    for add in (None, False, True):
        bucket, chunk = torch.full((64,), 3e4, dtype=torch.float16), torch.ones(16, dtype=torch.float16)
        if add is None:
            reducer.to_all(bucket)()
            chunk = bucket
        else:
            reducer.to_owner(bucket, chunk, add=add)()
        found.append(chunk.unique().tolist())
    return found


@pytest.mark.parametrize("ordered", [False, True])
def test_a_mean_that_fits_survives_a_sum_that_does_not(world, ordered):
    mean = torch.tensor(3e4, dtype=torch.float16)
    assert world(4).run(low_buckets, ordered) == [[[mean.item()], [mean.item()], [(mean + 1).item()]]] * 4


def wide_values():
    bucket = torch.full((64,), 1 + 2.0**-40, dtype=torch.float64)
    Reducer(Reduction(2), dist.group.WORLD, Stock(CPU)).to_all(bucket)()
    return bucket[0].item()


def test_doubles_stay_doubles_unless_a_dtype_is_asked_for(world):
    assert world(2).run(wide_values) == [2 + 2.0**-39] * 2


def cut(counts):
    """The same values in one bucket, or cut into several: the bits of to_all and of to_owner, as a whole."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    reducer = Reducer(Reduction(ranks, after=1 / ranks, in_rank_order=True), dist.group.WORLD, Stock(CPU))
    found = []
    for count in counts:
        to_all = [bucket.clone() for bucket in values(rank).chunk(count)]
        for finish in [reducer.to_all(bucket) for bucket in to_all]:
            finish()
        owned = [torch.empty(bucket.numel() // ranks) for bucket in to_all]
        buckets = values(rank).chunk(count)
        for finish in [reducer.to_owner(*pair, add=False) for pair in zip(buckets, owned, strict=True)]:
            finish()
        found.append((torch.cat(to_all), owned))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_order_of_ranks_gives_the_same_bits_for_any_cut(world, ranks):
    expected = in_rank_order(ranks) / ranks
    counts = (1, 2, 8, 32)
    results = world(ranks).run(cut, counts)
    for number, count in enumerate(counts):
        for rank in range(ranks):
            to_all, owned = results[rank][number]
            assert torch.equal(to_all, expected)
            mine = [bucket.chunk(ranks)[rank] for bucket in expected.chunk(count)]
            assert all(torch.equal(one, other) for one, other in zip(owned, mine, strict=True))


ROWS = {0: {1: 1.0, 5: 2.0}, 1: {}, 2: {5: 3.0, 0: 4.0}, 3: {7: float("nan")}}


def rows(which, dtype=None, before=1.0):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gradient = torch.zeros(8, 3)
    for row, value in which[rank].items():
        gradient[row] = value
    Reducer(Reduction(ranks, dtype, before, 1 / (ranks * before)), dist.group.WORLD, Stock(CPU)).rows_to_all(gradient)
    return gradient


@pytest.mark.parametrize(("dtype", "before"), [(None, 1.0), ("bfloat16", 0.25)])
def test_rows_that_differ_by_rank_are_summed(world, dtype, before):
    expected = torch.zeros(8, 3)
    expected[0], expected[1], expected[5], expected[7] = 1.0, 0.25, 1.25, float("nan")
    for gradient in world(4).run(rows, ROWS, dtype, before):
        assert torch.equal(gradient.nan_to_num(99), expected.nan_to_num(99))


def test_no_rank_has_any_row(world):
    assert all(torch.equal(gradient, torch.zeros(8, 3)) for gradient in world(2).run(rows, {0: {}, 1: {}}))


def test_one_rank_sends_nothing():
    bucket = values(0)
    Reducer(Reduction(1), None, Stock(CPU)).to_all(bucket)()
    assert torch.equal(bucket, values(0))
