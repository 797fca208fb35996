"""Exchanges of tensor parallelism: values and gradients as of one process, for any shape, dimension, dtype and size."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import mizzen.errors
from mizzen.comm import collectives
from mizzen.model.home import evenly
from mizzen.parallel.tensor import exchange
from mizzen.parallel.tensor.exchange import (
    copy_in,
    gather_along,
    gather_sequence,
    scatter_sequence,
    split_along,
    sum_out,
)

SHAPES = [((8,), 0), ((4, 8), 0), ((4, 8), -1), ((2, 8, 3), 1), ((8, 1, 2), 0)]
UNEVEN = [((7,), 0), ((3, 5), 1), ((5, 2, 3), 0), ((2, 3, 2), -2)]
EXACT = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def drawn(shape, seed: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parts_of(x, dim, sizes):
    return [part.contiguous() for part in x.split(list(sizes), dim)]


def through(function, x, grad, *arguments):
    """A value and the gradient of what it was made of, in the given dtype; a value is new, or is not changed."""
    x = x.clone().requires_grad_()
    kept = x.detach().clone()
    y = function(x, *arguments)
    y.backward(grad)
    assert torch.equal(x.detach(), kept)
    assert y.dtype is x.dtype and x.grad.dtype is x.dtype
    return y.detach(), x.grad


def pairs(cases, dtype):
    """Each exchange of each case beside what one process computes from all ranks' tensors."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    rows = []
    for shape, dim in cases:
        # What each rank brings of a whole tensor, and what it has of the gradient of one; what all have alike.
        every, every_grad = ([drawn(shape, 10 * part + seed, dtype) for seed in range(ranks)] for part in (1, 2))
        alike, alike_grad = drawn(shape, 1, dtype), drawn(shape, 2, dtype)
        total, total_grad = (torch.stack(each).float().sum(0).to(dtype) for each in (every, every_grad))
        sizes = evenly(shape[dim], ranks)
        part, part_grad = parts_of(alike, dim, sizes)[rank], parts_of(alike_grad, dim, sizes)[rank]
        given = None if len(set(sizes)) == 1 else sizes
        rows += [
            (through(copy_in, alike, every_grad[rank], group), (alike, total_grad)),
            (through(sum_out, every[rank], alike_grad, group), (total, alike_grad)),
            (through(gather_along, part, alike_grad, dim, group, given), (alike, part_grad)),
            (through(split_along, alike, part_grad, dim, group), (part, alike_grad)),
            (
                through(gather_sequence, part, every_grad[rank], dim, group, given),
                (alike, parts_of(total_grad, dim, sizes)[rank]),
            ),
            (
                through(scatter_sequence, every[rank], part_grad, dim, group),
                (parts_of(total, dim, sizes)[rank], alike_grad),
            ),
        ]
    return rows


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("cases", [SHAPES, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("dtype", list(EXACT))
def test_values_and_gradients_are_those_of_one_process(world, ranks, cases, dtype):
    for rows in world(ranks).run(pairs, cases, dtype):
        assert len(rows) == 6 * len(cases)
        for seen, expected in rows:
            for ours, theirs in zip(seen, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=EXACT[dtype], atol=EXACT[dtype])


def alone():
    x, named = drawn((4, 3), 1), (gather_along, split_along, gather_sequence, scatter_sequence)
    calls = [(copy_in, ()), (sum_out, ()), *((function, (0,)) for function in named)]
    return [function(x, *where, group) is x for group in (dist.group.WORLD, None) for function, where in calls]


def test_one_rank_has_nothing_to_exchange(world):
    assert all(world(1).run(alone)[0])


WIDTH, INNER, BATCH = 6, 8, 4


class Block(torch.nn.Module):
    """Two matrices, the first cut by columns and the second by rows, between activations that are cut, or are not."""

    def __init__(self, group, sequence: bool) -> None:
        super().__init__()
        self.group, self.sequence = group, sequence
        ranks, rank = (group.size(), group.rank()) if group else (1, 0)
        self.up = torch.nn.Parameter(drawn((INNER, WIDTH), 1).chunk(ranks, 0)[rank].clone())
        self.down = torch.nn.Parameter(drawn((WIDTH, INNER), 2).chunk(ranks, 1)[rank].clone())

    def forward(self, x):
        x = gather_sequence(x, 0, self.group) if self.sequence else copy_in(x, self.group)
        y = torch.nn.functional.linear(torch.tanh(torch.nn.functional.linear(x, self.up)), self.down)
        return scatter_sequence(y, 0, self.group) if self.sequence else sum_out(y, self.group)


def trained(how: str, sequence: bool):
    """A loss, the gradient of the input and of both matrices, all of them whole."""
    group = dist.group.WORLD
    block = Block(group, sequence)
    whole = drawn((BATCH, WIDTH), 3).requires_grad_()
    x = split_along(whole, 0, group) if sequence else whole
    run = block
    if how == "compiled":
        run = torch.compile(block, backend="aot_eager", fullgraph=True)
    y = checkpoint(run, x, use_reentrant=False) if how == "recomputed" else run(x)
    y = gather_along(y, 0, group) if sequence else y
    loss = (y**2).mean()
    loss.backward()
    grads = [gather_along(p.grad, dim, group) for p, dim in ((block.up, 0), (block.down, 1))]
    return loss.item(), whole.grad, *grads


@pytest.mark.parametrize("how", ["eager", "recomputed", "compiled"])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_that_is_cut_is_the_block_of_one_process(world, how, sequence):
    block, x = Block(None, False), drawn((BATCH, WIDTH), 3).requires_grad_()
    expected = (block(x) ** 2).mean()
    expected.backward()
    for loss, *grads in world(2).run(trained, how, sequence, timeout=120):
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        for ours, theirs in zip(grads, (x.grad, block.up.grad, block.down.grad), strict=True):
            torch.testing.assert_close(ours, theirs)


def second_order(sequence: bool):
    group = dist.group.WORLD
    block = Block(group, sequence)
    whole = drawn((BATCH, WIDTH), 3).requires_grad_()
    x = split_along(whole, 0, group) if sequence else whole
    y = block(x)
    y = gather_along(y, 0, group) if sequence else y
    (first,) = torch.autograd.grad((y**2).mean(), whole, create_graph=True)
    return torch.autograd.grad((first**2).sum(), whole)[0]


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_can_be_differentiated_again(world, sequence):
    x = drawn((BATCH, WIDTH), 3).requires_grad_()
    (first,) = torch.autograd.grad((Block(None, False)(x) ** 2).mean(), x, create_graph=True)
    (expected,) = torch.autograd.grad((first**2).sum(), x)
    for ours in world(2).run(second_order, sequence):
        torch.testing.assert_close(ours, expected)


def wrong(kind: str) -> str:
    group, rank = dist.group.WORLD, dist.get_rank()
    calls = {
        "shape": lambda: sum_out(torch.ones(3 + rank), group),
        "call": lambda: (sum_out if rank else gather_along)(torch.ones(4), *(() if rank else (0,)), group),
        "parts": lambda: gather_along(torch.ones(3), 0, group, sizes=(2, 2)),
        "whole": lambda: split_along(torch.ones(3), 0, group, sizes=(2, 2)),
    }
    with pytest.raises(mizzen.errors.MizzenError) as refusal:
        calls[kind]()
    return str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", "unit 'tensor parallel', phase 'sum': all_reduce of 4"),
        ("call", "phase 'gather'"),
        ("parts", "brings 3 in dimension 0, where the sizes of the parts are said to be [2, 2]"),
        ("whole", "3 in dimension 0 cannot be shared out as [2, 2] among 2 ranks"),
    ],
)
def test_ranks_that_bring_different_things_are_told_so(world, kind, words):
    for said in world(2).run(wrong, kind):
        assert words in said


def counted():
    """How many messages a forward and a backward take."""
    group, counts = dist.group.WORLD, {}

    def counting(call, *arguments, **options):
        counts[call.__name__] = counts.get(call.__name__, 0) + 1
        return call(*arguments, **options)

    for call in (collectives.all_reduce, collectives.all_gather_into_tensor, collectives.all_to_all_single):
        setattr(exchange.collectives, call.__name__, partial(counting, call))
    Block(group, False)(drawn((BATCH, WIDTH), 3).requires_grad_()).sum().backward()
    plain, counts = dict(counts), counts.clear() or counts
    Block(group, True)(drawn((BATCH, WIDTH), 3).requires_grad_()).sum().backward()
    return plain, dict(counts)


def test_a_block_takes_as_many_messages_as_it_must(world):
    for plain, sequence in world(2).run(counted):
        assert plain == {"all_reduce": 2}
        assert sequence == {"all_gather_into_tensor": 2, "all_to_all_single": 2}
