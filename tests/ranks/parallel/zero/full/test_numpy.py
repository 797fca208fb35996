"""A gathered parameter as a numpy array: whoever takes one keeps its values, and training goes on."""

import pytest
import torch
from torch import nn

from mizzen import zero
from ranks.parallel.zero.full.models import Base, Block, rows, start


class Looking(Block):
    """Takes arrays of its weights in the middle of a forward pass."""

    def forward(self, hidden):
        self.seen = self.up.weight.detach().numpy()
        return super().forward(hidden)


def losses(engine, look, steps=3):
    found = []
    for step in range(steps):
        look()
        loss = engine(rows(step, engine.global_rank))
        engine.backward(loss)
        assert engine.step().applied
        found.append(loss.item())
    return found


def model(block):
    torch.manual_seed(3)
    return Base(block=block)


def plain():
    return losses(start(model(Block), 3), lambda: None)


def gathered():
    """Arrays of whole parameters outlive the context in which they were taken."""
    engine, arrays = start(model(Block), 3), []

    def look():
        with zero.GatheredParameters(list(engine.module.parameters())):
            weight = engine.module.blocks[0].up.weight
            arrays.append((weight.detach().numpy(), weight.detach().clone()))

    found = losses(engine, look)
    assert len({array.tobytes() for array, _ in arrays}) == 3
    assert all(torch.equal(torch.from_numpy(array), copy) for array, copy in arrays)
    return found


def inside():
    """Arrays that are taken while backward is still to come."""
    engine = start(model(Looking), 3)
    found = losses(engine, lambda: None)
    assert engine.module.blocks[1].seen.shape == (16, 8)
    return found


def frozen():
    """The same of weights that rest in blocks."""
    torch.manual_seed(3)
    base = Base(block=Looking)
    for block in base.blocks:
        block.up = nn.Linear(8, 32)
        block.down = nn.Linear(32, 8)
        block.up.requires_grad_(False)
    engine = start(base, 3, zero={"zero_quantized_nontrainable_weights": True})
    return losses(engine, lambda: None)[-1]


@pytest.mark.parametrize("program", [gathered, inside])
def test_training_goes_on(world, program):
    assert world(2).run(program) == world(2).run(plain)


def test_weights_in_blocks(world):
    assert all(loss < 10 for loss in world(2).run(frozen))
