"""Rewrites of a model that a pipeline cuts: they find its blocks, and leave what other stages run alone."""

import pytest
import torch
from torch import nn

from mizzen.config.load import load
from mizzen.errors import PlanError
from mizzen.model.sketch import Sketch
from mizzen.model.tree import Elsewhere, modules_here
from mizzen.order import ORDER
from mizzen.plan.build import build


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).mean()


def plan(**keys):
    return build(load({"train_batch_size": 4, "pipeline_parallel_size": 2, **keys}), 2, Sketch.of(Model()), ORDER)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"activation_checkpointing": {"mode": "full"}}, "recompute: 2 blocks (Sequential)"),
        ({"compile": {"enabled": True}}, "compile: 2 blocks (Sequential) one by one by inductor"),
    ],
)
def test_blocks_of_all_stages_are_found(keys, words):
    assert words in [str(step) for step in plan(**keys).steps]


def test_stages_that_would_not_be_told_of_dropped_layers_are_refused():
    with pytest.raises(PlanError, match="progressive_layer_drop.enabled over pp=2: stages are not told"):
        plan(progressive_layer_drop={"enabled": True})


def test_what_other_ranks_run_is_left_alone():
    model = Model()
    model.blocks[0] = Elsewhere()
    assert list(modules_here(model, ["blocks.0", "blocks.1", "blocks.2"])) == [model.blocks[1]]
