"""What a rank really holds at rest is what the plan has counted, but for the padding of flat tensors."""

import pytest
import torch

from breadth import choice
from mizzen.config.load import load
from mizzen.model.sketch import Sketch
from mizzen.order import ORDER
from mizzen.parallel.zero.full.division import transient
from mizzen.parallel.zero.full.shard import FullChoice
from mizzen.parallel.zero.full.sharded_parameter import MULTIPLE, record_of
from mizzen.parallel.zero.full.store import FullStore
from mizzen.plan.build import build
from mizzen.plan.cost import Cost
from ranks.parallel.zero.full.models import MODELS, config, rows, start

BF16 = {"bf16": {"enabled": True}}
SMALL = {"zero": {"stage3_param_persistence_threshold": 50}}
CASES = [("Base", {}), ("TiedBlocks", BF16), ("Lora", {}), ("Odd", {}), ("Base", SMALL)]


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def held(kind, keys):
    """The plan's cost at rest, and the bytes that are there after two steps."""
    ranks = torch.distributed.get_world_size()
    plan = build(load(config(3, ranks, **dict(keys))), ranks, Sketch.of(MODELS[kind]()), ORDER)
    choice = next(step.choice for step in plan.steps if isinstance(step.choice, FullChoice))
    engine = start(kind, 3, **dict(keys))
    for step in range(2):
        data = rows(step, engine.global_rank)
        engine.backward(engine(data.bfloat16() if "bf16" in keys else data))
        engine.step()
    full = [store for store in engine.stores if isinstance(store, FullStore)][0]
    masters = [share.master for share in full.shares]
    frozen = [record_of(p).shard for name, p in full.contents.held.items() if name not in full.contents.trained]
    states = engine.basic_optimizer.state.values()
    found = Cost(
        parameters=size(frozen) + (0 if "bf16" in keys else size(masters)),
        gradients=size(unit.sums.read() for unit in full.units),
        masters=size(masters) if "bf16" in keys else 0,
        states=size(value for state in states for value in state.values() if value.dim()),
    )
    for store in engine.stores[1:]:
        found += Cost(
            parameters=size(bucket.values for bucket in store.buckets),
            gradients=size(bucket.gradient for bucket in store.buckets),
            masters=size(b.master for b in store.buckets if b.master.dtype != b.values.dtype),
        )
    names = {name for store in engine.stores for name in store.contents.held}
    rest = [p for name, p in engine.module.named_parameters() if name not in names]
    return plan.cost - transient(choice.parts(0)[0].sets[0]), found + Cost(parameters=size(rest)), len(masters)


@pytest.mark.parametrize(("kind", "keys"), choice(CASES, CASES[1::2]))
def test_the_plan_counts_what_is_held(world, kind, keys):
    for planned, found, shares in world(2).run(held, kind, keys):
        padding = 4 * MULTIPLE * shares
        for part in ("parameters", "gradients", "masters"):
            assert -padding <= getattr(found, part) - getattr(planned, part) <= padding, part
        assert -padding <= found.states - planned.states <= 2 * padding
