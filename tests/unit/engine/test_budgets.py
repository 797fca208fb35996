"""Budgets from what is free: pure arithmetic over a plan, and what a plan says before they are known."""

import pytest

from mizzen.config.load import load
from mizzen.config.zero import OffloadConfig
from mizzen.engine.budgets import FreeBytes, _free_on, budgets_from, measured
from mizzen.environment import World
from mizzen.errors import ConfigError
from mizzen.model.sketch import ParameterSketch, Sketch
from mizzen.offload.places import Budget, OffloadSettings
from mizzen.order import ORDER
from mizzen.plan.build import build
from mizzen.plan.explain import explain

COUNT = 1 << 20
SKETCH = Sketch((ParameterSketch("weight", (1024, COUNT // 1024)),))
AUTO = {"device_bytes": "auto", "host_bytes": "auto", "nvme_bytes": "auto"}


def config_of(**more):
    base = {"train_batch_size": 8, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    return load(base | more)


def nvme():
    return {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}}


def needs_of(**more):
    return measured(config_of(offload=AUTO, **more), SKETCH, World(rank=0, size=1, local_rank=0))


def budgets(free, needs, *, is_fixed=False, **asked):
    return budgets_from(free, needs, OffloadConfig(**AUTO | asked), is_fixed=is_fixed)


def test_half_of_what_the_plan_leaves_of_a_device_and_all_that_gradients_leave_of_the_host():
    needs = needs_of()
    assert (needs.device, needs.host, needs.beside, needs.resting) == (6 * COUNT, 0, 4 * COUNT, 12 * COUNT)
    free = FreeBytes(device=16 * COUNT, host=8 * COUNT, nvme=7 * COUNT)
    assert budgets(free, needs) == {"device_bytes": 5 * COUNT, "host_bytes": 6 * COUNT, "nvme_bytes": 7 * COUNT}
    assert budgets(free, needs, is_fixed=True)["device_bytes"] == 0
    nothing = FreeBytes(device=COUNT, host=0, nvme=0)
    assert set(budgets(nothing, needs).values()) == {0}


def test_a_device_keeps_more_where_nothing_else_has_room():
    needs, more = needs_of(), 12 * COUNT // 20
    assert budgets(FreeBytes(device=26 * COUNT, host=4 * COUNT, nvme=0), needs)["device_bytes"] == 10 * COUNT
    free = FreeBytes(device=17 * COUNT, host=3 * COUNT, nvme=0)
    assert budgets(free, needs)["device_bytes"] == 11 * COUNT - 11 * COUNT // 10  # it is all there is
    tight = FreeBytes(device=17 * COUNT, host=8 * COUNT, nvme=0)
    assert budgets(tight, needs)["device_bytes"] == 6 * COUNT + more
    assert budgets(tight, needs, host_bytes=COUNT * 5)["device_bytes"] == 7 * COUNT + more
    assert budgets(tight, needs, nvme_bytes=COUNT * 6)["device_bytes"] == 11 * COUNT // 2


def test_what_passes_through_host_memory_on_its_way_from_nvme_is_counted():
    plan = build(
        config_of(offload={"device_bytes": 0, "host_bytes": 0, "nvme_bytes": 1 << 30}, **nvme()), 1, SKETCH, ORDER
    )
    assert plan.cost.nvme == 12 * COUNT
    needs = needs_of(**nvme())
    assert (needs.host, needs.beside) == (12 * COUNT, 4 * COUNT)  # one lot, in which all there is passes
    assert plan.cost.host == needs.host + needs.beside


def test_gradients_of_what_rests_on_the_device_take_no_host_memory_beside_files():
    needs = needs_of(**nvme())
    free = FreeBytes(device=needs.device + 16 * COUNT, host=(12 + 4) * COUNT, nvme=3 * COUNT)
    half = budgets(free, needs)
    assert half["device_bytes"] == 8 * COUNT
    assert half["host_bytes"] == 4 * COUNT - 4 * COUNT * 4 // 12
    assert budgets(free, needs, is_fixed=True)["host_bytes"] == 0
    assert budgets(free, needs, device_bytes=3 * COUNT)["host_bytes"] == COUNT


ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 8, "update_interval": 4}


@pytest.mark.parametrize(
    ("zenflow", "in_backward", "beside"),
    [(None, True, 12 + 4), (ZENFLOW, False, 5), (ZENFLOW | {"overlap_step": True}, False, 11)],
)
def test_host_memory_beside_masters_and_states_is_left_free(zenflow, in_backward, beside):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}} | ({"zenflow": zenflow} if zenflow else {})
    asked = {"device_bytes": "auto", "host_bytes": "auto", "step_in_backward": in_backward}
    config = config_of(offload=asked, zero_optimization=zero)
    needs = measured(config, SKETCH, World(rank=0, size=1, local_rank=0))
    assert (needs.beside, needs.host) == ((4 + beside) * COUNT, 0)
    enough = FreeBytes(device=0, host=(4 + 12 + beside) * COUNT, nvme=0)
    assert budgets(enough, needs, is_fixed=True)["host_bytes"] == 12 * COUNT


def test_folders_on_one_disk_share_what_it_has(tmp_path):
    one = _free_on((str(tmp_path),))
    assert _free_on((str(tmp_path), str(tmp_path))) == pytest.approx(one, rel=0.05)
    assert _free_on(()) == 0


def test_a_plan_that_cannot_know_them_shows_the_most_that_may_leave():
    assert OffloadSettings.of(config_of(offload=AUTO)).budget == Budget(0, None, 0)
    assert OffloadSettings.of(config_of(offload=AUTO, **nvme())).budget == Budget(0, None, None)
    text = explain(build(config_of(offload=AUTO), 1, SKETCH, ORDER))
    assert 'offload device auto, host auto, nvme auto ("auto": from what is free, when training starts' in text
    assert "open" not in text
    text = explain(build(config_of(offload={"device_bytes": 1 << 20}), 1, SKETCH, ORDER))
    assert "offload device 1.0 MiB, host without a limit, nvme 0 B\n" in text


def test_other_words_are_refused():
    with pytest.raises(ConfigError, match='offload.host_bytes.*nor "auto"'):
        config_of(offload={"host_bytes": "some"})
