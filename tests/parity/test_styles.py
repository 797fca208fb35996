"""Styles of transformers' plans that its own models have for experts alone, on layers: two matrices in one."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mizzen
from breadth import chosen
from mizzen.config.load import load
from mizzen.errors import PlanError
from mizzen.model.sketch import Sketch
from mizzen.model.trace import flow_of
from mizzen.order import ORDER
from mizzen.plan.build import build
from parity import transformers_models as models
from parity.test_sequence_parts import compare
from parity.test_sequence_parts import train as models_train

WIDTH, INNER, STEPS, SAMPLES, RATE = 8, 10, 3, 4, 0.1
PLANS = {
    "halves": {"layers.*.first": "packed_colwise", "layers.*.second": "rowwise"},
    "side by side": {"layers.*.first": "packed_colwise", "layers.*.second": "packed_rowwise"},
    "unknown": {"layers.*.first": "packed_colwise", "layers.*.second": "packed_rowwise"},
    "unknown halves": {"layers.*.first": "packed_colwise", "layers.*.second": "rowwise"},
}
"""What a model does between its layers, and the plan that it comes with."""


class Layer(nn.Module):
    """Gate and up in one matrix, seen as halves, or both of them read by the next one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(WIDTH, 2 * INNER)
        self.second = nn.Linear(INNER if "halves" in how else 2 * INNER, WIDTH)
        if "unknown" not in how:  # where a forward cannot be followed, nobody sees what it meets
            self.scale = nn.Parameter(torch.rand(2 * INNER) + 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        both = self.first(hidden)
        both = both if "unknown" in self.how else both * self.scale
        if "halves" in self.how:
            gate, up = both.unflatten(-1, (2, -1)).unbind(-2)
            return hidden + self.second(functional.silu(gate) * up)
        return hidden + self.second(functional.silu(both))


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.how = how
        self.layers = nn.ModuleList(Layer(how) for _ in range(2))

    @property
    def tp_plan(self) -> dict[str, str]:
        return PLANS[self.how]

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        if "unknown" in self.how and hidden.is_meta:
            raise RuntimeError("needs values")
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden if target is None else functional.mse_loss(hidden, target)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    hidden, target = torch.randn(2, SAMPLES, 3, WIDTH, generator=generator).unbind()
    return hidden, target


def train(how: str, tp: int, stage: int) -> tuple[list, dict]:
    config = {
        "train_batch_size": SAMPLES,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"autotp_size": tp},
        "progress": {"enabled": False},
    }
    engine, *_ = mizzen.initialize(model=Model(how), config=config)
    losses = []
    for step in range(STEPS):
        parts = [each.chunk(engine.dp_world_size)[engine.get_data_parallel_rank()] for each in batch(step)]
        losses.append(engine.train_batch(iter([tuple(parts)])).loss)
    values = {name: mizzen.zero.safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    shapes = {name: tuple(p.shape) for name, p in engine.module.named_parameters()} if stage == 0 else {}
    engine.destroy()
    return losses, values, shapes


def check(found: list, how: str) -> None:
    model, losses = Model(how), []
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    rule = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        rule.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        rule.step()
        losses.append(loss.item())
    for ours, values, shapes in found:
        assert ours == pytest.approx(losses, rel=1e-5)
        assert values.keys() == before.keys()
        for name, value in model.named_parameters():
            wanted = value.detach() - before[name]
            assert (values[name] - before[name] - wanted).norm() <= 2e-3 * wanted.norm(), name
        if shapes:
            assert shapes["layers.0.first.weight"] == (INNER, WIDTH)


WHOLE = {"tensor_parallel": {"autotp_size": 2}}
EXPERTS = [("llama4", 2, 0, WHOLE), ("aria", 2, 1, WHOLE), ("granite", 2, 3, WHOLE), ("mixtral", 2, 2, WHOLE)]
EXPERTS = chosen(EXPERTS, [EXPERTS[0], EXPERTS[2]])


@pytest.mark.in_parts
def test_models_that_have_these_styles_for_experts_train_with_whole_experts(world):
    for case in EXPERTS:
        model = models.built(case[0])
        assert any(style.startswith("packed") for style in model.tp_plan.values()), case
    for case, found in zip(EXPERTS, world(2).each(models_train, EXPERTS), strict=True):
        compare(found, case[0])


CASES = [(how, 2, 3 * (how == "halves")) for how in PLANS]


def test_two_matrices_in_one_are_cut_each(world):
    for case, found in zip(CASES, world(2).each(train, CASES), strict=True):
        check(found, case[0])


@pytest.mark.wide
def test_two_matrices_in_one_are_cut_each_over_four_ranks(world):
    cases = [(how, tp, 1) for how in PLANS for tp in (2, 4)]
    for case, found in zip(cases, world(4).each(train, cases), strict=True):
        check(found, case[0])


def test_halves_of_one_layer_that_the_next_one_does_not_know_of_are_refused(monkeypatch):
    monkeypatch.setitem(PLANS, "side by side", {"layers.*.first": "packed_colwise", "layers.*.second": "rowwise"})
    model = Model("side by side")
    settings = load({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}})
    with pytest.raises(PlanError, match="'layers.0.first' is to be cut by outputs, as the model's own plan says"):
        build(settings, 2, Sketch.of(model).with_flow(flow_of(model)), ORDER)
    monkeypatch.setitem(PLANS, "unknown", PLANS["side by side"])
    model = Model("unknown")
    with pytest.raises(PlanError, match=r"'layers.0.first' gives 10 \+ 10 features and 'layers.0.second' reads 20"):
        build(settings, 2, Sketch.of(model).with_flow(flow_of(model)), ORDER)
