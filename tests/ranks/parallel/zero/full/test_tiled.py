"""Linear layers in tiles at stages 0 and 3: tiles are units of their own, and the loss is that of plain layers."""

import pytest
import torch
from torch import nn

from mizzen import zero
from mizzen.config.load import load
from mizzen.model.sketch import Sketch
from mizzen.order import ORDER
from mizzen.plan.build import build
from ranks.parallel.zero.full.models import Base, Block, config, start, train, values_of


class Tiles(Block):
    """A block whose layers are in tiles."""

    def __init__(self):
        super().__init__()
        self.up = zero.TiledLinear(8, 16, in_splits=2, out_splits=3, init_linear=self.up)
        self.down = zero.TiledLinear(16, 8, in_splits=4, init_linear=self.down)


def model(kind):
    """The same weights whatever the kind: building tiles takes random numbers too."""
    torch.manual_seed(3)
    plain = Base()
    if kind is Block:
        return plain
    tiled = Base(block=kind)
    for layer, other in ((tiled.first, plain.first), (tiled.last, plain.last)):
        layer.load_state_dict(other.state_dict())
    for block, other in zip(tiled.blocks, plain.blocks, strict=True):
        block.up.copy_params_from(other.up)
        block.down.copy_params_from(other.down)
    return tiled


def trained(kind, stage):
    return train(model(kind), stage, 2)


def test_the_loss_is_that_of_plain_layers(world):
    cases = [(Block, 0), (Tiles, 0), (Tiles, 3)]
    expected, plain, sharded = (ranks[0] for ranks in world(2).each(trained, cases))
    assert plain[0] == pytest.approx(expected[0], rel=1e-5)
    assert sharded[:2] == plain[:2]
    for name, value in plain[2].items():
        assert torch.equal(sharded[2][name], value), name


def built(is_early):
    """Inside zero.Init, with parameters of a layer that is cut already, or outside of it."""
    torch.manual_seed(3)
    with zero.Init(enabled=is_early):
        found = Base(block=Tiles)
    return train(found, 3, 2)[0]


def test_a_model_that_is_cut_while_it_is_built(world):
    early, late = world(2).each(built, [(True,), (False,)])
    assert early[0] == late[0]


def copied():
    """From a layer of an engine."""
    engine = start(model(Block), 3)
    tiled = zero.TiledLinear(8, 16, in_splits=2, out_splits=2)
    layer = engine.module.blocks[0].up
    tiled.copy_params_from(layer)
    rows = [torch.cat([tile.weight for tile in row], 1) for row in tiled.linears]
    return torch.equal(torch.cat(rows), values_of(engine)["blocks.0.up.weight"])


def test_parameters_of_a_sharded_layer(world):
    assert world(2).run(copied) == [True, True]


def test_tiles_are_units_unless_they_are_pinned():
    def units(**keys):
        plan = build(load(config(3, 2, zero=keys)), 2, Sketch.of(model(Tiles)), ORDER)
        return [unit.path for unit in plan.steps[-1].choice.parts(0)[0].sets[0].division.units]

    found = units()
    assert found[:2] == ["", "blocks.0.up.linears.0.0"]
    assert sum("blocks.1." in path for path in found) == 6 + 4
    assert "blocks.1" not in found  # it has nothing of its own
    assert units(leaf_module={"classes": ["Tiles"]}) == ["", "blocks.0", "blocks.1", "blocks.2"]


def gathered_at_most():
    """The largest gather of a step."""
    engine = start(nn.Sequential(zero.TiledLinear(64, 64, bias=False, out_splits=4)), 3)
    return max(unit.plan.numel for unit in engine.stores[0].units)


def test_a_tile_is_gathered_at_a_time(world):
    assert world(2).run(gathered_at_most) == [64 * 16] * 2
