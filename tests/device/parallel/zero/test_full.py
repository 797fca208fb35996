"""Stage 3 on one accelerator is stage 0; and the messages of several are those of the CPU."""

import torch
from torch import nn

import mizzen
from mizzen import zero
from mizzen.kernels.quantize import pack, unpack


def test_one_rank_has_nothing_to_shard():
    torch.manual_seed(0)
    with zero.Init():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    engine, *_ = mizzen.initialize(model=model, config=config)
    engine.backward(engine(torch.ones(4, 8, device=engine.device)).mean())
    assert engine.step().applied
    assert zero.facts_of(model[0].weight).status == "whole"


def test_messages_are_those_of_the_cpu():
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    for bits in (4, 8):
        there = pack(values.cuda(), bits)
        assert torch.equal(unpack(there, 1000, bits).cpu(), unpack(there.cpu(), 1000, bits))
        torch.testing.assert_close(unpack(there, 1000, bits).cpu(), unpack(pack(values, bits), 1000, bits))
