"""Who steps which whole parameter, and what the plan says and counts of it. No ranks."""

from dataclasses import replace

from torch import nn

from mizzen.config.load import load
from mizzen.model.sketch import ParameterSketch, Sketch
from mizzen.order import ORDER
from mizzen.parallel.zero.full.division import choose_owners
from mizzen.plan.build import build
from mizzen.plan.explain import explain


def parameters(*sizes, is_whole=True):
    return [ParameterSketch(f"p{number}", (size, 1), is_whole=is_whole) for number, size in enumerate(sizes)]


def test_owners_have_about_as_much():
    sizes = (5, 8, 3, 7, 1, 6)
    owners = choose_owners(parameters(*sizes), 3)
    assert [name for name, _ in owners] == [f"p{number}" for number in range(6)]
    loads = [sum(size for size, (_, owner) in zip(sizes, owners, strict=True) if owner == rank) for rank in range(3)]
    assert sorted(loads) == [9, 10, 11]


def test_only_what_is_trained_and_needed_whole_has_an_owner():
    assert choose_owners(parameters(4, 4, is_whole=False), 2) == ()
    frozen = [replace(each, requires_grad=False) for each in parameters(4)]
    assert choose_owners(frozen, 2) == ()


def test_the_plan_says_so_and_counts_the_rank_that_owns_most():
    keys = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = load({"train_batch_size": 8, "zero_optimization": keys, "optimizer": {"type": "Muon"}})
    sketch = Sketch.of(nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3)))
    flat, whole = (sketch.with_groups({p.name: 0 for p in sketch.parameters}, groups) for groups in ((), {0}))
    plan = build(config, 2, whole, ORDER)
    assert "3 are stepped whole, each by one rank" in explain(plan)
    n = 64 * 64 * 4
    assert plan.cost.states == 2 * n  # the momentum of two of three matrices
    assert plan.cost.parameters - build(config, 2, flat, ORDER).cost.parameters == 2 * n
