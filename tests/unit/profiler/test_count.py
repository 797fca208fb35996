"""Whose an operation is, in forward, in backward, computed again, compiled, and in groups."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mizzen.accelerator import get_accelerator
from mizzen.profiler.count import Count
from mizzen.profiler.tree import grow

ROWS, WIDTH, FEED = 4, 8, 16


class Block(nn.Module):
    """A product of its own before two layers; the first of them sees what that has given."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.wide = nn.Linear(WIDTH, FEED)
        self.back = nn.Linear(FEED, WIDTH)

    def forward(self, x):
        return self.back(self.wide(x @ self.mix).relu()) + x


MIX, LAYER = 2 * ROWS * WIDTH * WIDTH, 2 * ROWS * WIDTH * FEED


def counted(model, run):
    count = Count(model, get_accelerator())
    with count.open():
        run()
    return {branch.path: branch for branch in grow(model, count.read()).walk()}


def test_each_module_has_its_own_in_forward_and_in_backward():
    model = nn.Sequential(Block(), Block())
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    found = counted(model, lambda: model(x).sum().backward())
    for block in ("0", "1"):
        assert [found[f"{block}.{name}"].forward for name in ("wide", "back")] == [LAYER, LAYER]
        assert [found[f"{block}.{name}"].backward for name in ("wide", "back")] == [2 * LAYER, 2 * LAYER]
        assert (found[block].forward, found[block].backward) == (MIX + 2 * LAYER, 2 * (MIX + 2 * LAYER))
    assert found[""].forward == 2 * (MIX + 2 * LAYER) and found[""].macs == MIX + 2 * LAYER
    assert found[""].calls == 1 and found[""].seconds >= found["0"].seconds > 0


def test_forward_and_backward_may_be_counted_one_after_the_other():
    model = nn.Sequential(Block(), nn.Linear(WIDTH, 1))
    count = Count(model, get_accelerator())
    with count.open():
        loss = model(torch.randn(ROWS, WIDTH, requires_grad=True)).sum()
    torch.ones(3, 3) @ torch.ones(3, 3)  # not counted
    with count.open():
        loss.backward()
    tree = grow(model, count.read())
    assert (tree.forward, tree.backward) == (MIX + 2 * LAYER + 2 * ROWS * WIDTH, 2 * tree.forward)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_is_told_apart(reentrant):
    model = Block()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def run():
        checkpoint(model, x, use_reentrant=reentrant, early_stop=False).sum().backward()

    found = counted(model, run)
    again = MIX + 2 * LAYER
    assert found[""].recomputed == again
    assert (found[""].forward, found[""].backward) == (again, 3 * again)
    assert found[""].model_flops == 3 * again
    assert [found[name].backward for name in ("wide", "back")] == [3 * LAYER, 3 * LAYER]


def test_a_recomputation_that_stops_early_leaves_nothing_open():
    model = nn.Sequential(Block(), Block())
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    found = counted(model, lambda: checkpoint(model, x, use_reentrant=False).sum().backward())
    assert found[""].recomputed == 2 * MIX + 3 * LAYER  # all but the last layer, whose result nobody needs
    assert found[""].backward - found[""].recomputed == 2 * found[""].forward
    assert found["1.back"].backward == 2 * LAYER


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_compiled_blocks_are_seen(backend):
    model = nn.Sequential(Block(), Block())
    for block in model:
        block.compile(backend=backend)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    model(x).sum().backward()  # it is compiled now
    found = counted(model, lambda: model(x).sum().backward())
    assert (found[""].forward, found[""].backward) == (2 * (MIX + 2 * LAYER), 4 * (MIX + 2 * LAYER))
    assert found["1.wide"].forward == LAYER


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 16, 32, dtype=torch.bfloat16))

    def forward(self, x, ends):
        return functional.grouped_mm(x, self.experts, offs=ends)


def test_grouped_products():
    model = Grouped()
    x = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([2, 8], dtype=torch.int32)
    found = counted(model, lambda: model(x, ends).backward(torch.ones(8, 32, dtype=torch.bfloat16)))
    assert (found[""].forward, found[""].backward) == (2 * 8 * 16 * 32, 4 * 8 * 16 * 32)


@pytest.mark.parametrize("heads", [4, 2])
def test_attention(heads):
    query = torch.randn(2, 4, 6, 8, requires_grad=True)
    keys = torch.randn(2, heads, 10, 8, requires_grad=True)

    class Attention(nn.Module):
        def forward(self):
            return functional.scaled_dot_product_attention(query, keys, keys, enable_gqa=heads < 4)

    model = Attention()
    found = counted(model, lambda: model().sum().backward())
    product = 2 * 2 * 4 * 6 * 10 * 8
    assert (found[""].forward, found[""].backward) == (2 * product, 5 * product)


def test_nothing_stays_behind():
    model = nn.Sequential(Block(), Block())
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    plain = [hook for module in model.modules() for hook in module._forward_hooks]
    count = Count(model, get_accelerator())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), count.open():
        model(torch.randn(ROWS, 3))
    with count.open():
        loss = model(x).sum()
        loss.backward(retain_graph=True)
    before = grow(model, count.read()).backward
    loss.backward()  # the graph still has its hooks; nobody counts
    assert grow(model, count.read()).backward == before
    assert [hook for module in model.modules() for hook in module._forward_hooks] == plain
