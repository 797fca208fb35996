"""What a plan says of a step on the host during backward: what it refuses, in words and in bytes."""

import pytest

from mizzen.config.load import load
from mizzen.errors import PlanError
from mizzen.offload.places import OffloadSettings
from mizzen.plan.explain import explain
from unit.offload.test_zenflow import HOST, STEPS, planned

EARLY = {"step_in_backward": True}
NVME = {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}


def early(zero=HOST, **keys):
    return planned(None, zero=zero, **{"offload": EARLY} | keys)


REFUSED = {
    "the host has nothing to step": {"zero": {}},
    "what rests on NVMe is stepped after the vote": {"zero": NVME},
    "zenflow has a step of its own": {"zero": HOST | {"zenflow": STEPS}},
    "masters are in fp32": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "element by element, and Muon does not": {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}},
    "use an offload.streamed_ratio below 1": {"offload": EARLY | {"streamed_ratio": 1}},
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("said", REFUSED)
def test_what_it_cannot_do_is_refused(said, stage):
    with pytest.raises(PlanError, match="offload.step_in_backward") as caught:
        early(stage=stage, **REFUSED[said])
    assert said in str(caught.value)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_its_price_is_masters_and_states_once_more_and_the_largest_gradient(stage):
    bf16 = {"bf16": {"enabled": True}}
    without, plan = planned(None, stage=stage, **bf16), early(stage=stage, **bf16)
    count = 4 * 64 * 64 // (2 if stage else 1)
    more = plan.cost.host - without.cost.host
    assert 12 * count < more <= 16 * count
    assert more - 12 * count in (4 * count, count)  # one lot at stages 0 to 2; one of four units
    assert plan.cost.total == without.cost.total
    assert "the host steps during backward, into copies" in explain(plan)
    assert "during backward" not in explain(without)


def test_the_other_name_means_the_same():
    other = {"offload_optimizer": {"device": "cpu", "super_offload": True}}
    assert planned(None, zero=other).cost == early().cost
    assert OffloadSettings.of(load({"train_batch_size": 2, "zero_optimization": other})).in_backward


def test_a_section_without_budgets_leaves_places_to_offload_optimizer():
    assert "rest in host" in explain(planned(None, offload={"threads": 3}))
    assert "offload device" not in explain(planned(None, offload={"threads": 3}))
    assert "rest in host" not in explain(planned(None, offload={"device_bytes": 1 << 30}))
