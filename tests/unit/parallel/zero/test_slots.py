"""Where parameters lie: each exactly once, aligned, in buckets that any number of ranks can share."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.parallel.zero.slots import ALIGNMENT, CHUNK, LARGE, Bucket, Buffer, Slot, Tenant, bucket_limit, lay_out

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@st.composite
def tenants(draw):
    rows = draw(st.lists(st.tuples(SHAPES, st.sampled_from(["float32", "bfloat16"]), st.integers(0, 2), st.booleans())))
    return [
        Tenant(f"p{number}", shape, dtype, group, is_sparse and len(shape) == 2)
        for number, (shape, dtype, group, is_sparse) in enumerate(rows)
    ]


everything = given(tenants=tenants(), chunks=st.integers(1, 9), limit=st.integers(1, 5000))
property_test = settings(max_examples=100)


def slots_of(buffers):
    return [slot for buffer in buffers for bucket in buffer.buckets for slot in bucket.slots]


@property_test
@everything
def test_every_parameter_has_exactly_one_place(tenants, chunks, limit):
    slots = slots_of(lay_out(tenants, chunks=chunks, bucket_elements=limit))
    assert sorted((slot.name, slot.shape) for slot in slots) == sorted((t.name, t.shape) for t in tenants)
    sizes = {tenant.name: tenant.numel for tenant in tenants}
    assert all(slot.stop - slot.start == sizes[slot.name] for slot in slots)


@property_test
@everything
def test_places_are_aligned_disjoint_and_inside_of_their_bucket(tenants, chunks, limit):
    for buffer in lay_out(tenants, chunks=chunks, bucket_elements=limit):
        for bucket in buffer.buckets:
            assert bucket.slots
            assert all(slot.start % ALIGNMENT == 0 for slot in bucket.slots)
            assert all(one.stop <= other.start for one, other in pairwise(bucket.slots))
            assert bucket.slots[-1].stop <= bucket.numel


@property_test
@everything
def test_buckets_are_neighbours_that_the_ranks_can_share(tenants, chunks, limit):
    for buffer in lay_out(tenants, chunks=chunks, bucket_elements=limit):
        assert buffer.buckets[0].start == 0
        assert all(one.stop == other.start for one, other in pairwise(buffer.buckets))
        assert buffer.numel == buffer.buckets[-1].stop
        for bucket in buffer.buckets:
            assert bucket.numel > 0
            is_large = bucket.slots[-1].stop >= LARGE * chunks
            assert bucket.numel % ((CHUNK if is_large else ALIGNMENT) * chunks) == 0


@property_test
@everything
def test_padding_is_bounded(tenants, chunks, limit):
    for buffer in lay_out(tenants, chunks=chunks, bucket_elements=limit):
        for bucket in buffer.buckets:
            occupied = sum(slot.stop - slot.start for slot in bucket.slots)
            assert bucket.numel - occupied < ALIGNMENT * len(bucket.slots) + CHUNK * chunks


@property_test
@everything
def test_the_limit_is_exceeded_only_by_one_larger_parameter(tenants, chunks, limit):
    for buffer in lay_out(tenants, chunks=chunks, bucket_elements=limit):
        for bucket in buffer.buckets:
            elements = [slot.stop - slot.start for slot in bucket.slots if slot.stop > slot.start]
            assert sum(elements) <= limit or len(elements) == 1


@property_test
@everything
def test_sparse_gradients_travel_alone(tenants, chunks, limit):
    sparse = {tenant.name for tenant in tenants if tenant.is_sparse}
    for buffer in lay_out(tenants, chunks=chunks, bucket_elements=limit):
        for bucket in buffer.buckets:
            names = {slot.name for slot in bucket.slots}
            assert bucket.is_sparse == bool(names & sparse)
            assert not bucket.is_sparse or len(bucket.slots) == 1


@property_test
@everything
def test_one_buffer_for_each_group_and_dtype_last_parameters_first(tenants, chunks, limit):
    buffers = lay_out(tenants, chunks=chunks, bucket_elements=limit)
    kinds = [(buffer.group, buffer.dtype) for buffer in buffers]
    assert kinds == list(dict.fromkeys((tenant.group, tenant.dtype) for tenant in tenants))
    for buffer in buffers:
        mine = [tenant.name for tenant in tenants if (tenant.group, tenant.dtype) == (buffer.group, buffer.dtype)]
        assert [slot.name for slot in slots_of([buffer])] == mine[::-1]
        assert buffer.occupied == sum(tenant.numel for tenant in tenants if tenant.name in mine)


def test_nothing_needs_no_buffer():
    assert lay_out([], chunks=4, bucket_elements=100) == ()
    assert (Buffer(0, "float32", ()).numel, Buffer(0, "float32", ()).occupied) == (0, 0)


def test_by_hand():
    tenants = [
        Tenant("scalar", (), "float32", 0),
        Tenant("empty", (0, 4), "float32", 0),
        Tenant("large", (100,), "float32", 0),
        Tenant("small", (5, 6), "float32", 0),
    ]
    (buffer,) = lay_out(tenants, chunks=2, bucket_elements=64)
    assert buffer.buckets == (
        Bucket(0, 64, (Slot("small", (5, 6), 0, 30),)),
        Bucket(64, 192, (Slot("large", (100,), 0, 100),)),
        Bucket(192, 256, (Slot("empty", (0, 4), 0, 0), Slot("scalar", (), 0, 1))),
    )


@pytest.mark.parametrize(
    ("total", "asked", "limit"),
    [
        (1 << 28, 500_000_000, 1 << 25),  # eight buckets
        (1 << 33, 500_000_000, 1 << 26),  # large enough to be fast
        (1 << 30, 1 << 20, 1 << 20),  # as asked
        (1000, 500_000_000, 1 << 22),  # too small to be worth cutting
        (1000, 10, 10),
        (0, 500_000_000, 1 << 22),
    ],
)
def test_the_size_of_buckets(total, asked, limit):
    assert bucket_limit(total, asked) == limit
