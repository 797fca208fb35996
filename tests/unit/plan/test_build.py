"""A plan is a value: made by pure functions, refused with every reason at once, and carried out in the given order."""

from dataclasses import FrozenInstanceError, dataclass

import pytest
from torch import nn

from mizzen.config.load import load
from mizzen.errors import ConfigError, LayoutError, PlanError
from mizzen.model.sketch import ParameterSketch, Sketch
from mizzen.order import ORDER
from mizzen.plan.build import build
from mizzen.plan.cost import Cost, replicated
from mizzen.plan.parts import Part
from mizzen.plan.transform import Transform
from mizzen.plan.unbuilt import Refusal

SKETCH = Sketch((ParameterSketch("w", (64, 64)), ParameterSketch("b", (64,))))
CONFIG = {"train_batch_size": 16, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}


@dataclass(frozen=True)
class Double(Transform):
    """A made-up change that costs `extra` bytes and leaves a mark on the parts."""

    name: str
    extra: int = 0
    refuses: bool = False
    is_wanted: bool = True

    def wants(self, config, layout, drafts):
        if self.refuses:
            raise PlanError(f"{self.name}: {len(drafts[0].parameters)} parameters on {layout.world} ranks are too many")
        return f"{self.extra} bytes more" if self.is_wanted else None

    def price(self, choice, rank):
        return Cost(parameters=self.extra)

    def apply(self, parts, choice, mesh):
        return (*parts, (self.name, choice, mesh))


@pytest.mark.parametrize("order", [(), ORDER, (Double("a", 3),)], ids=["nothing", "all", "made up"])
@pytest.mark.parametrize("world", [1, 4])
def test_the_same_arguments_give_equal_plans(order, world):
    plans = [build(load(CONFIG), world, SKETCH, order) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0] != build(load(CONFIG), 2, SKETCH, order)


def test_a_plan_cannot_be_changed():
    plan = build(load(CONFIG), 1, SKETCH, ORDER)
    with pytest.raises(FrozenInstanceError):
        plan.classes = ()


def test_transforms_run_in_their_order_and_those_not_wanted_do_not():
    order = (Double("first", 1), Double("never", 100, is_wanted=False), Double("second", 2))
    plan = build(load(CONFIG), 1, SKETCH, order)
    assert [str(step) for step in plan.steps] == ["first: 1 bytes more", "second: 2 bytes more"]
    part = Part(module=None)
    assert plan.apply((part,), "mesh") == (part, ("first", "1 bytes more", "mesh"), ("second", "2 bytes more", "mesh"))


def test_costs_of_transforms_add_up():
    plan = build(load(CONFIG), 1, SKETCH, (Double("a", 10), Double("b", -3)))
    assert plan.cost == replicated(load(CONFIG), SKETCH) + Cost(parameters=7)
    assert [step.cost for step in plan.steps] == [Cost(parameters=10), Cost(parameters=-3)]


def test_every_reason_at_once(monkeypatch):
    unbuilt = [Refusal("one.key", "one thing", "leave it"), Refusal("another", "more", "wait")]
    monkeypatch.setattr("mizzen.plan.build.refusals", lambda config: unbuilt)
    with pytest.raises(PlanError) as caught:
        build(load(CONFIG), 4, SKETCH, (Double("a", refuses=True), Double("fine"), Double("b", refuses=True)))
    assert str(caught.value).splitlines() == [
        "one.key: one thing is not built yet; leave it",
        "another: more is not built yet; wait",
        "a: 2 parameters on 4 ranks are too many",
        "b: 2 parameters on 4 ranks are too many",
    ]


def test_what_does_not_fit_the_ranks_is_said_before_the_plan():
    with pytest.raises(ConfigError, match="train_batch_size"):
        build(load(CONFIG), 3, SKETCH, ORDER)
    with pytest.raises(LayoutError, match="world size 3"):
        build(load({**CONFIG, "pipeline_parallel_size": 2}), 3, SKETCH, ORDER)


def test_the_plan_holds_what_was_resolved():
    plan = build(load({**CONFIG, "gradient_accumulation_steps": 2}), 4, SKETCH, ORDER)
    assert (plan.resolved.batch.micro, plan.resolved.layout.dp, plan.sketch) == (2, 4, SKETCH)
    assert plan.resolved.config.train_micro_batch_size_per_gpu == 2


class Plain(nn.Module):
    def forward(self, inputs):
        return inputs


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"progressive_layer_drop": {"enabled": True}}, "Plain.forward does not take pld_theta"),
        ({"compile": {"enabled": True, "backend": "no such thing"}}, "torch has no 'no such thing'"),
    ],
)
def test_what_a_model_cannot_do_is_refused_before_it_is_touched(keys, words):
    with pytest.raises(PlanError, match=words):
        build(load({**CONFIG, **keys}), 1, Sketch.of(Plain()), ORDER)
