"""Micro-batches of a step: each is moved when it runs, and whether data has ended is asked on the host."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import nn

from mizzen.comm import groups
from mizzen.engine import runner, status
from mizzen.engine.phases import Phases
from mizzen.engine.runner import Accumulate, RunnerContext
from mizzen.engine.status import EngineStatus
from mizzen.plan.parts import Part


class Model(nn.Module):
    def __init__(self, said):
        super().__init__()
        self.weight, self.said = nn.Parameter(torch.ones(())), said

    def forward(self, inputs):
        self.said.append("forward")
        return self.weight * inputs.sum()


def test_a_micro_batch_is_moved_when_it_runs(monkeypatch):
    said = []
    monkeypatch.setattr(runner, "to_device", lambda batch, device: said.append("move") or batch)
    arithmetic = SimpleNamespace(
        call=lambda module, args, kwargs: module(*args, **kwargs), region=nullcontext,
        scaler=SimpleNamespace(scaled=lambda loss: loss),
    )  # fmt: skip
    stream, changes = SimpleNamespace(active=nullcontext), SimpleNamespace(adopt=lambda: None)
    running = RunnerContext((Part(Model(said)),), None, torch.device("cpu"), Phases(None), stream, arithmetic, changes)
    tally = Accumulate(running).run([torch.ones(2), torch.ones(3)], None)
    assert said == ["move", "forward"] * 2 and tally.loss == 5


def test_the_end_of_data_is_asked_without_the_device(monkeypatch):
    asked = []
    monkeypatch.setattr(groups, "exchange_device", lambda group=None: torch.device("cpu"))
    monkeypatch.setattr(status.collectives, "all_reduce", lambda tensor, op: asked.append(tensor.device.type))
    engine = SimpleNamespace(world_size=2, device=torch.device("meta"))  # whose values nobody could read
    assert EngineStatus.fewest_over_ranks(engine, 3) == 3 and asked == ["cpu"]
