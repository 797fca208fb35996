"""Gradients on their way to their owners, however and in whatever order they come in."""

import math
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from mizzen.comm import collectives
from mizzen.errors import UsageError
from mizzen.parallel.zero.gradients import WholeGradients
from mizzen.parallel.zero.live import LiveBucket
from ranks.parallel.zero.programs import (
    SHAPES,
    STAGES,
    Bag,
    at_rest,
    backward,
    bytes_of,
    gradient,
    hold,
    mean,
    whole,
)


def same(found, ranks, steps=1, without=None):
    for name in SHAPES:
        expected = mean(name, ranks, steps, without)
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


# Orders


def every_order(stage):
    """Each rank in an order of its own, which changes from step to step."""
    bag = Bag()
    store = hold(bag, stage, limit=60)
    found = []
    for step in range(6):
        backward(store, bag.loss(dist.get_rank(), step, shuffled=True))
        found.append(whole(store))
        store.clear_gradients()
    return found


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_order_of_arrival_on_any_rank(world, stage, ranks):
    for found in world(ranks).run(every_order, stage):
        for step, gradients in enumerate(found):
            for name in SHAPES:
                expected = sum(gradient(name, rank, step) for rank in range(ranks)) / ranks
                torch.testing.assert_close(gradients[name], expected)


def buckets_in_order(stage):
    bag = Bag()
    store = hold(bag, stage, limit=60)
    left = []
    leave = store.gradients.leave
    store.gradients.leave = lambda bucket: left.append([slot.name for slot in bucket.plan.slots]) or leave(bucket)
    backward(store, bag.loss(dist.get_rank(), 0, shuffled=True))
    return left


@pytest.mark.parametrize("stage", STAGES)
def test_buckets_leave_in_one_order_last_parameters_first(world, stage):
    one, other = world(2).run(buckets_in_order, stage)
    assert one == other == [["e"], ["d"], ["c"], ["empty", "scalar", "b"], ["a"]]


def bits_of_stages(limits):
    found = []
    for limit in limits:
        for stage in STAGES:
            bag = Bag()
            store = hold(bag, stage, limit=limit, in_rank_order=True)
            backward(store, bag.loss(dist.get_rank(), 0, shuffled=True))
            found.append(whole(store))
    return found


def test_in_rank_order_every_stage_and_every_cut_give_the_same_bits(world):
    for found in world(4).run(bits_of_stages, (40, 1000)):
        for name in SHAPES:
            expected = sum(gradient(name, rank, 0) for rank in range(4)) / 4
            assert all(torch.equal(gradients[name], expected) for gradients in found)


# Missing gradients

WITHOUT = {0: {"b", "scalar"}, 1: {"a", "e"}}


def with_some_missing(stage, overlap):
    bag = Bag()
    store = hold(bag, stage, limit=60, overlap=overlap)
    for step in range(2):
        loss = bag.loss(dist.get_rank(), step, without=WITHOUT[dist.get_rank()])
        backward(store, loss, last=step == 1)
    store.reduce()
    return whole(store)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_a_gradient_counts_as_zero(world, stage, overlap):
    for found in world(2).run(with_some_missing, stage, overlap):
        same(found, 2, steps=2, without=WITHOUT)


def with_all_missing_on_one_rank(stage, last):
    """One rank's loss touches no trained parameter at all; `bare` backwards are not announced."""
    bag, stranger = Bag(), torch.zeros(1, requires_grad=True)
    store = hold(bag, stage, limit=60)
    loss = bag.loss(0, 0) if dist.get_rank() == 0 else stranger.sum()
    if last == "bare":
        loss.backward()
    else:
        backward(store, loss, last)
    store.reduce()
    return whole(store)


@pytest.mark.parametrize("last", [True, False, None, "bare"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_any_gradient_still_takes_part(world, stage, last):
    for found in world(2).run(with_all_missing_on_one_rank, stage, last):
        same(found, 2, without={1: set(SHAPES)})


def without_any_backward(stage):
    store = hold(Bag(), stage)
    store.reduce()
    return whole(store)


@pytest.mark.parametrize("stage", STAGES)
def test_without_a_backward_gradients_are_zero(world, stage):
    for found in world(2).run(without_any_backward, stage):
        assert all(not gradients.any() for gradients in found.values())


# Several backwards before a step


def several(stage, lasts):
    bag = Bag()
    store = hold(bag, stage, limit=60)
    for step, last in enumerate(lasts):
        loss = bag.loss(dist.get_rank(), step, shuffled=True)
        if last == "bare":
            loss.backward()
        else:
            backward(store, loss, last)
    unannounced = store.gradients.has_unannounced
    store.reduce()
    once = whole(store)
    store.reduce()
    twice = whole(store)
    assert all(torch.equal(once[name], twice[name]) for name in once)
    store.clear_gradients()
    assert not any(value.any() for value in whole(store).values())
    assert not store.gradients.has_unannounced
    return once, unannounced


SEQUENCES = {
    "accumulation": (False, False, True),
    "two that were both to be the last": (True, True),
    "a further one after the last": (True, False),
    "held back": (None, None),
    "held back, then let go": (None, True),
    "held back after others have left": (False, None),
    "bare": ("bare", "bare"),
    "bare, then announced": ("bare", True),
    "announced, then bare": (False, "bare"),
}


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("stage", STAGES)
def test_the_sum_of_all_backwards(world, stage, sequence):
    lasts = SEQUENCES[sequence]
    for found, unannounced in world(2).run(several, stage, lasts):
        same(found, 2, steps=len(lasts))
        assert unannounced == ("bare" in lasts)


def held_back(stage):
    """What is sent while gradients are to stay: nothing."""
    bag = Bag()
    store = hold(bag, stage)
    sent = []
    store.gradients.leave = lambda bucket: sent.append(bucket) or (lambda: None)
    backward(store, bag.loss(dist.get_rank(), 0), None)
    bag.loss(dist.get_rank(), 1).backward()
    return len(sent), [parameter.grad is not None for parameter in bag.parameters()]


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_held_back_stays(world, stage):
    for sent, has_gradient in world(2).run(held_back, stage):
        assert sent == 0
        assert all(has_gradient)


def kept_in_place(stage):
    bag = Bag()
    store = hold(bag, stage)
    copied, told = [], []
    put, keep = LiveBucket.put, WholeGradients.keep

    def noted(bucket, found, factor=1.0):
        copied.extend(found)
        put(bucket, found, factor)

    def kept(gradients, bucket, position):
        told.append(bucket.plan.slots[position].name)
        keep(gradients, bucket, position)

    with patch.object(LiveBucket, "put", noted), patch.object(WholeGradients, "keep", kept):
        for step, last in enumerate((False, False, False, True)):
            backward(store, bag.loss(dist.get_rank(), step), last)
    return whole(store), copied, told


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_stay_are_copied_to_their_places_once_and_then_added_there(world, stage):
    """From the second backward on autograd adds to the places itself, and nobody is told of it."""
    for found, copied, told in world(2).run(kept_in_place, stage):
        same(found, 2, steps=4)
        assert sorted(told) == sorted(SHAPES)
        assert len(copied) == len(SHAPES)


def read_after_the_first(stage):
    bag = Bag()
    store = hold(bag, stage)
    backward(store, bag.loss(dist.get_rank(), 0), False)
    own = {name: parameter.grad.clone() for name, parameter in bag.named_parameters()}
    for bucket in store.buckets:
        bucket.filled()
    pairs = [pair for bucket in store.buckets for pair in zip(bucket.plan.slots, bucket.views, strict=True)]
    found = {slot.name: place for slot, place in pairs}
    is_same = all(torch.equal(found[name], own[name]) for name in own)
    backward(store, bag.loss(dist.get_rank(), 1), True)
    return is_same, whole(store)


@pytest.mark.parametrize("stage", [0, 1])
def test_who_asks_for_a_gradient_before_the_second_backward_gets_it(world, stage):
    for is_same, found in world(2).run(read_after_the_first, stage):
        assert is_same
        same(found, 2, steps=2)


# Wrong uses, and what users do


def reentrant(stage, overlap):
    layer = nn.Linear(4, 4)
    store = hold(layer, stage, overlap=overlap)
    inputs = torch.ones(2, 4, requires_grad=True) * (dist.get_rank() + 1)
    twice = checkpoint(layer, checkpoint(layer, inputs, use_reentrant=True), use_reentrant=True)
    try:
        backward(store, twice.sum())
    except UsageError as error:
        return str(error)
    plain = nn.Linear(4, 4)
    plain.load_state_dict(layer.state_dict())
    for rank in range(2):
        inputs = torch.ones(2, 4) * (rank + 1)
        plain(plain(inputs)).sum().backward()
    found = whole(store)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad / 2)
    return ""


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_comes_twice_is_refused_by_name(world, stage):
    for message in world(2).run(reentrant, stage, True):
        assert message.startswith(("a second gradient of 'weight' arrived", "a second gradient of 'bias' arrived"))
        assert "use_reentrant=False" in message
        assert "zero_optimization.overlap_comm to false" in message


@pytest.mark.parametrize("stage", STAGES)
def test_without_overlap_a_gradient_may_come_twice(world, stage):
    assert world(2).run(reentrant, stage, False) == ["", ""]


def zeroed_by_the_user(stage):
    """`zero_grad()` after the first of two backwards, of which the second leaves one parameter out."""
    bag = Bag()
    store = hold(bag, stage)
    rank = dist.get_rank()
    backward(store, bag.loss(rank, 7), False)
    bag.zero_grad(set_to_none=True)
    backward(store, bag.loss(rank, 0, without={"c"}), True)
    found = whole(store)
    store.clear_gradients()
    bag.zero_grad(set_to_none=True)
    backward(store, bag.loss(rank, 0))
    return found, whole(store), [parameter.grad is not None for parameter in bag.parameters()]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_zero_grad_of_the_users_starts_again(world, stage):
    for between, after, has_gradient in world(2).run(zeroed_by_the_user, stage):
        same(between, 2, without={0: {"c"}, 1: {"c"}})
        same(after, 2)
        assert all(has_gradient)


def test_at_stage_2_gradients_that_have_left_cannot_be_taken_back_by_the_module(world):
    for _, after, has_gradient in world(2).run(zeroed_by_the_user, 2):
        same(after, 2)
        assert not any(has_gradient)


def replaced_by_the_user(stage):
    bag = Bag()
    store = hold(bag, stage)
    backward(store, bag.loss(dist.get_rank(), 0), None)
    for parameter in bag.parameters():
        parameter.grad = parameter.grad * 2
    store.reduce()
    return whole(store)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_the_user_replaces_are_the_ones_that_count(world, stage):
    for found in world(2).run(replaced_by_the_user, stage):
        same({name: value / 2 for name, value in found.items()}, 2)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs):
        return inputs.clone()

    @staticmethod
    def backward(context, gradient):
        raise ValueError("broken")


def after_a_failure(stage):
    """Every rank fails at the same place, with some buckets sent and one half full, and goes on from zero."""
    bag = Bag()
    store = hold(bag, stage, limit=120)
    last = Broken.apply(bag.a).sum()  # what was computed first is differentiated last
    store.begin_backward(True)
    with pytest.raises(ValueError, match="broken"):
        (last + bag.loss(dist.get_rank(), 5, without={"a"})).backward()
    assert [len(bucket.missing) for bucket in store.buckets] == [0, 0, 0, 1]
    store.clear_gradients()
    backward(store, bag.loss(dist.get_rank(), 0))
    return whole(store)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_failed_leaves_nothing_behind(world, stage):
    for found in world(2).run(after_a_failure, stage):
        same(found, 2)


# Dtypes and sparse gradients


def low_precision(stage, accumulation, wire):
    bag = Bag()
    store = hold(bag, stage, held="bfloat16", dtypes={"accumulation": accumulation}, dtype=wire)
    for step in range(2):
        backward(store, bag.loss(dist.get_rank(), step), step == 1)
    kinds = {piece.dtype for piece in store.pieces("gradient")}
    return whole(store), kinds


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("accumulation", "wire", "kind"),
    [
        ("float32", None, torch.float32),
        ("float32", "bfloat16", torch.float32),
        ("float32", "float16", torch.float32),
        ("bfloat16", None, torch.bfloat16),
        ("float16", "float16", torch.float32),  # no half holds both halves
    ],
)
def test_gradients_add_up_and_travel_in_the_dtypes_asked_for(world, stage, accumulation, wire, kind):
    for found, kinds in world(2).run(low_precision, stage, accumulation, wire):
        assert kinds == {kind}
        for name in SHAPES:
            torch.testing.assert_close(found[name], mean(name, 2, 2), rtol=2e-2, atol=5e-2)


class Words(nn.Module):
    def __init__(self, *, sparse):
        super().__init__()
        self.table = nn.Embedding(50, 4, sparse=sparse)
        self.head = nn.Linear(4, 1, bias=False)


def embedded(stage, by_rows, sparse, held=None):
    torch.manual_seed(0)
    words = Words(sparse=sparse)
    plain = Words(sparse=False)
    plain.load_state_dict(words.state_dict())
    store = hold(words, stage, sparse={"table.weight"} if by_rows else (), held=held)
    seen = [torch.tensor([1, 2, 2]), torch.tensor([2, 49])]
    for step in range(2):
        backward(store, words.head(words.table(seen[dist.get_rank()])).sum(), step == 1)
        for tokens in seen:
            (plain.head(plain.table(tokens)).sum() / 2).backward()
    found = whole(store)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=2e-2, atol=2e-2)
    return True


@pytest.mark.parametrize("held", [None, "bfloat16"])
@pytest.mark.parametrize(("by_rows", "sparse"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("stage", STAGES)
def test_embeddings_by_rows_and_with_sparse_gradients(world, stage, by_rows, sparse, held):
    assert all(world(2).run(embedded, stage, by_rows, sparse, held))


# Memory of stage 2


def on_the_way(limit):
    """During a backward: whole buckets in flight, gradients on parameters, and the bytes of both."""
    bag = Bag({f"p{number}": (64, 4) for number in range(8)})
    store = hold(bag, 2, limit=limit)
    flats, in_flight, left_over = [], [], []
    start = collectives.all_to_all_single

    def alive():
        return sum(flat() is not None for flat in flats)

    def watched(received, sent, *splits, **keys):
        flats.append(weakref.ref(sent))
        in_flight.append(at_rest(alive, 2))
        left_over.append(bytes_of([p.grad for p in bag.parameters() if p.grad is not None]))
        return start(received, sent, *splits, **keys)

    collectives.all_to_all_single = watched
    backward(store, sum((parameter * 2).sum() for parameter in bag.parameters()))
    return in_flight, left_over, at_rest(alive, 0)


def test_stage_2_has_at_most_two_buckets_in_flight_and_frees_gradients(world):
    for in_flight, left_over, remaining in world(2).run(on_the_way, 256):
        assert in_flight == [1, 2, 2, 2, 2, 2, 2, 2]
        assert left_over == [0] * 8
        assert remaining == 0


# What is not finite

BAD = {0: {"scalar": math.nan}, 1: {"a": math.inf, "e": -math.inf}, 2: {}, 3: {"e": math.nan}}


def not_finite(stage, lasts):
    bag = Bag()
    store = hold(bag, stage, limit=60)
    rank = dist.get_rank() if dist.is_initialized() else 1
    for step, last in enumerate(lasts):
        loss = bag.loss(rank, step)
        if step == 0:
            for name, value in BAD[rank].items():
                loss = loss + getattr(bag, name).reshape(-1)[-1] * value
        backward(store, loss, last)
    found = sorted(store.reduce().nonfinite()), torch.isfinite(store.reduce().squares()).item()
    store.clear_gradients()
    backward(store, bag.loss(rank, 3))
    return found, store.reduce().nonfinite()


@pytest.mark.parametrize("lasts", [(True,), (False, True)])
@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_names_its_own_parameters(world, stage, lasts):
    for rank, ((names, _), later) in enumerate(world(4).run(not_finite, stage, lasts)):
        assert names == sorted(BAD[rank])
        assert later == []


def test_one_rank_names_them_too():
    (names, is_finite), later = not_finite(0, (True,))
    assert names == sorted(BAD[1])
    assert not is_finite
    assert later == []
