"""Checkpoints of engines on an accelerator: bitwise back, beside training too, and random numbers of the device."""

import pytest
import torch
from torch import nn

import mizzen
from mizzen.checkpoint.read import Reader, compare
from mizzen.checkpoint.save import Staging
from mizzen.checkpoint.write import Item
from mizzen.model.piece import piece_of_whole


def build(seed, dtype="bf16"):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(33, 65), nn.Dropout(0.3), nn.Linear(65, 7))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
        "seed": 3,
        "deterministic": True,
        dtype: {"enabled": True},
        "progress": {"enabled": False},
    }
    return mizzen.initialize(model=model, config=config)[0]


def train(engine, steps):
    losses = []
    for step in range(steps):
        inputs = torch.randn(4, 33, generator=torch.Generator().manual_seed(step)).to(engine.device, torch.bfloat16)
        loss = engine(inputs).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("beside", [False, True])
def test_training_goes_on_bitwise(tmp_path, beside):
    engine = build(1)
    train(engine, 3)
    engine.save_checkpoint(tmp_path / "one", async_save=beside)
    losses = train(engine, 3)
    engine.finish_saving()
    fresh = build(2)
    fresh.load_checkpoint(tmp_path / "one")
    fresh.save_checkpoint(tmp_path / "two")
    with Reader(tmp_path / "one" / "global_step3") as one, Reader(tmp_path / "two" / "global_step3") as two:
        assert [each.what for each in compare(one, two) if " '" in each.what] == []
    assert train(fresh, 3) == losses


def test_copies_of_the_device_are_pinned():
    accelerator = mizzen.get_accelerator()
    data = torch.arange(7, dtype=torch.float32, device=accelerator.device())
    (item,) = Staging().copies([Item("model", piece_of_whole("a", data))])
    assert item.piece.data.tolist() == data.tolist()
    assert accelerator.shares_host_memory or item.piece.data.is_pinned()
