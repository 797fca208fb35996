"""Frozen weights in 8-bit blocks at rest: the model computes with what the blocks say, and everybody reads that."""

import pytest
import torch
from torch import nn

from breadth import choice
from mizzen import zero
from mizzen.config.load import load
from mizzen.kernels.quantize import BLOCK, pack, unpack
from mizzen.model.sketch import Sketch
from mizzen.order import ORDER
from mizzen.parallel.zero.full.quantized import Packed
from mizzen.parallel.zero.full.sharded_parameter import MULTIPLE, record_of
from mizzen.plan.build import build
from ranks.parallel.zero.full.models import Base, config, rows, start, train

KEY = {"zero_quantized_nontrainable_weights": True}
WIDE, RANK = 53, 2


class Adapted(nn.Module):
    """A frozen layer, whose rows do not divide, with an adapter; and a frozen vector."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, WIDE).requires_grad_(False)
        self.down = nn.Linear(WIDE, 8, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(8, RANK, bias=False), nn.Linear(RANK, 8, bias=False)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(hidden))) + self.b(self.a(hidden))


class Lora(Base):
    def __init__(self):
        super().__init__(block=Adapted)

    def hidden(self, rows):
        return super().hidden(rows) + torch.tanh(rows.repeat(1, 2) @ self.blocks[0].up.weight.t()[:, :8])


def through_blocks(weight, ranks):
    """What is left of a weight whose shards are quantized, each by itself."""
    each = -(-len(weight) // ranks)
    parts = [part.reshape(1, -1) for part in torch.split(weight, each)]
    return torch.cat([unpack(pack(part, 8), part.numel(), 8).view(-1, weight.shape[1]) for part in parts])


def lora(ranks=0, dtype=torch.float32):
    """With the seed of all; its frozen matrices as blocks would leave them, for so many ranks."""
    torch.manual_seed(3)
    model = Lora().to(dtype)
    for parameter in model.parameters() if ranks else ():
        if not parameter.requires_grad and parameter.dim() > 1 and parameter.numel() >= BLOCK * ranks:
            parameter.data = through_blocks(parameter.data, ranks).to(dtype)
    return model


def trained(keys, ranks=0):
    return train(lora(ranks), 3, zero=keys)


@pytest.mark.parametrize("ranks", choice([2, 3], [3]))
def test_the_model_computes_with_what_the_blocks_say(world, ranks):
    (expected, *_), found = world(ranks).each(trained, [({}, ranks), (KEY,)])
    for losses, norms, values in found:
        assert (losses, norms) == expected[:2]
        assert all(torch.equal(values[name], expected[2][name]) for name in expected[2])


def test_blocks_that_run_again_in_backward(world):
    """They are gathered once more, between what the first run has saved and its use."""
    recomputed = world(2).run(train_recomputed)[0]
    assert recomputed == pytest.approx(world(2).run(trained, KEY)[0][0], rel=1e-6)


def train_recomputed():
    return train(lora(), 3, zero=KEY, activation_checkpointing={"mode": "full"})[0]


def held():
    """What is counted, and what is there: bytes of frozen shards."""
    plain, small = (load(config(3, 2, zero=keys)) for keys in ({}, KEY))
    counted = [build(each, 2, Sketch.of(lora()), ORDER).cost.parameters for each in (plain, small)]
    engine = start(lora(), 3, zero=KEY)
    shards = {name: record_of(p).shard for name, p in engine.module.named_parameters() if not p.requires_grad}
    sizes = {name: each.untyped_storage().nbytes() for name, each in shards.items()}
    return counted[0] - counted[1], sizes, {name for name, each in shards.items() if isinstance(each, Packed)}


def test_memory_is_that_of_the_blocks(world):
    for saved, sizes, packed in world(2).run(held):
        assert packed == {f"blocks.{number}.{layer}.weight" for number in range(3) for layer in ("up", "down")}
        blocks = {"up": -(-27 * 8 // BLOCK), "down": -(-4 * WIDE // BLOCK)}
        for name in packed:
            assert sizes[name] == blocks[name.split(".")[2]] * (BLOCK + 4)
        expected = 3 * (4 * 27 * 8 + 4 * 4 * WIDE) - sum(sizes[name] for name in packed)
        assert 0 <= saved - expected < 3 * 4 * MULTIPLE  # the padding of a unit's plain shards


def in_bf16():
    engine = start(lora(dtype=torch.bfloat16), 3, zero=KEY, bf16={"enabled": True})
    losses = []
    for _ in range(3):
        loss = engine(rows(0, engine.global_rank).bfloat16())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.module.blocks[0].up.weight.dtype


def test_bf16(world):
    losses, dtype = world(2).run(in_bf16)[0]
    assert dtype == torch.bfloat16
    assert losses[2] < losses[0]


def access():
    """Reading and writing a weight that rests in blocks, every way there is."""
    engine = start(lora(), 3, zero=KEY)
    model, seen = engine.module, through_blocks(lora().blocks[1].up.weight, 2)
    weight = model.blocks[1].up.weight
    assert torch.equal(zero.safe_get_full_fp32_param(weight), seen)
    assert torch.equal(model.state_dict()["blocks.1.up.weight"].full_tensor(), seen)
    with zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        assert torch.equal(model.blocks[1].up.weight, seen)
        model.blocks[1].up.weight.fill_(0.5)
    assert torch.equal(zero.safe_get_full_fp32_param(weight), torch.full_like(seen, 0.5))
    model.load_state_dict({"blocks.1.up.weight": lora().blocks[1].up.weight}, strict=False)
    assert isinstance(record_of(model.blocks[1].up.weight).shard, Packed)
    assert torch.equal(zero.safe_get_full_fp32_param(weight), seen)
    engine.destroy()
    return type(model.blocks[1].up.weight).__name__, torch.equal(model.blocks[1].up.weight, seen)


def test_access(world):
    assert world(2).run(access) == [("Parameter", True)] * 2


def early():
    torch.manual_seed(3)
    with zero.Init():
        model = Lora()
    return train(model, 3, zero=KEY)[0]


def test_a_model_that_was_cut_while_it_was_built(world):
    assert world(2).run(early)[0] == world(2).run(trained, KEY)[0][0]
