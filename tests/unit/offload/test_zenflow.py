"""What a plan says of ZenFlow: what it refuses, in words and in bytes."""

import pytest
from torch import nn

from mizzen.config.load import load
from mizzen.errors import PlanError
from mizzen.model.sketch import Sketch
from mizzen.order import ORDER
from mizzen.plan.build import build
from mizzen.plan.explain import explain

HOST = {"offload_optimizer": {"device": "cpu"}}
STEPS = {"select_strategy": "step", "select_interval": 8, "update_interval": 4}


def planned(zenflow, ranks=2, zero=HOST, stage=2, **keys):
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
    section = {"stage": stage, "stage3_param_persistence_threshold": 0, **zero}
    section |= {} if zenflow is None else {"zenflow": zenflow}
    config = load({"train_batch_size": 8, "zero_optimization": section, **keys})
    return build(config, ranks, Sketch.of(model).with_groups({name: 0 for name, _ in model.named_parameters()}), ORDER)


REFUSED = {
    "needs offload_optimizer with device cpu": {"zero": {}},
    "it needs offload_optimizer with device cpu": {
        "zero": {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}
    },
    "it needs Adam or AdamW, not Lion": {"optimizer": {"type": "Lion", "params": {"lr": 0.1}}},
    "parameters stay on the device: leave offload_param out": {
        "zero": HOST | {"offload_param": {"device": "cpu"}},
        "stage": 3,
    },
    "leave bf16_master_weights_and_grads": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "leave offload.nvme_bytes out": {
        "offload": {"nvme_bytes": 5},
        "zero": {"offload_optimizer": {"device": "cpu", "nvme_path": "/x"}},
    },
    "leave offload.streamed_ratio out": {"offload": {"streamed_ratio": 0.5}},
    "several tensor-parallel ranks yet, and there are 2": {"tensor_parallel": {"autotp_size": 2}},
    "several copies yet, and there are 2": {"zero": HOST | {"mics_shard_size": 2}, "ranks": 4, "stage": 3},
    'select_strategy "step" needs a number': {"zenflow": {"select_strategy": "step"}},
    'select_interval 3 counts nothing with select_strategy "auto"': {"zenflow": {"select_interval": 3}},
    "select_interval 3 is below update_interval 4": {"zenflow": STEPS | {"select_interval": 3}},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_it_cannot_do_is_refused(said):
    with pytest.raises(PlanError, match="zero_optimization.zenflow: ") as caught:
        planned(**({"zenflow": STEPS} | REFUSED[said]))
    assert said in str(caught.value)


def test_all_reasons_are_said_at_once():
    with pytest.raises(PlanError) as caught:
        planned({"select_interval": 3}, zero={}, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    assert all(said in str(caught.value) for said in ("device cpu", "not SGD", "counts nothing"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_plan_says_what_is_stepped_when(stage):
    words = "; zenflow: 0.1 of the columns in each step, the others"
    assert f"{words} when they are due" in explain(planned({}, stage=stage))
    assert f"{words} every 4 steps" in explain(planned(STEPS, stage=stage))
    assert "columns" not in explain(planned(None, stage=stage))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_plan_prices_it(stage):
    count = 4 * 64 * 64 // (2 if stage else 1)
    plain, late = planned(None, stage=stage).cost, planned(STEPS, stage=stage).cost
    tenth = round(0.1 * count)
    assert late.host - plain.host == 4 * count + count  # gradients that wait, and which columns are important
    taken = late.total - late.gradients - (plain.total - plain.gradients)
    assert taken == pytest.approx((4 + 8 + 8) * tenth, rel=0.01)  # masters, states, places
    assert (late.gradients > plain.gradients) == (stage == 3)  # there the sums stay on the device
    beside = planned(STEPS | {"overlap_step": True}, stage=stage).cost
    assert beside.host - late.host == 8 * count  # what it changes, and the values that the model gets
    apart = planned(STEPS | {"offload": True}, stage=stage).cost
    assert late.total - apart.total == pytest.approx(12 * tenth, rel=0.01)
    assert apart.host - late.host == pytest.approx(12 * tenth, rel=0.01)
