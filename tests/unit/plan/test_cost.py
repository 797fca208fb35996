"""The arithmetic of costs, and what a model costs where it is held whole."""

import pytest
import torch

from mizzen.config.load import load
from mizzen.model.sketch import ParameterSketch, Sketch
from mizzen.optim.build import OPTIMIZERS, build_optimizer
from mizzen.plan.cost import Cost, replicated, states_per_parameter, trained
from mizzen.precision.policy import Policy

SKETCH = Sketch(
    (
        ParameterSketch("w", (10, 10)),
        ParameterSketch("half", (10,), dtype="float16"),
        ParameterSketch("double", (10,), dtype="float64"),
        ParameterSketch("frozen", (1000,), requires_grad=False),
        ParameterSketch("left out", (100,), group=None),
        ParameterSketch("steps", (), dtype="int64", requires_grad=False),
    )
)


def test_costs_add_up_and_cancel():
    one, other = Cost(1, 2, 3, 4), Cost(10, 20, 30, 40)
    assert one + other == Cost(11, 22, 33, 44)
    assert one - other == Cost(-9, -18, -27, -36)
    assert one + -one == Cost()
    assert (one + other).total == one.total + other.total == 110


def test_a_cost_prints_itself():
    text = "2.5 KiB (parameters 1.0 KiB, gradients 512 B, masters 0 B, states 1.0 KiB)"
    assert str(Cost(1024, 512, 0, 1024)) == text


def test_a_model_as_it_is():
    cost = replicated(load({"optimizer": {"type": "AdamW"}}), SKETCH)
    assert cost == Cost(
        parameters=4 * 100 + 2 * 10 + 8 * 10 + 4 * 1000 + 4 * 100 + 8,
        gradients=4 * 100 + 4 * 10 + 8 * 10,
        masters=4 * 10,
        states=2 * (4 * 100 + 4 * 10 + 8 * 10),
    )


def test_a_model_in_bf16():
    cost = replicated(load({"bf16": {"enabled": True}, "optimizer": {"type": "SGD"}}), SKETCH)
    assert cost == Cost(parameters=2 * 1220 + 8, gradients=4 * 120, masters=4 * 120, states=0)


def test_gradients_may_add_up_in_less_but_not_in_less_than_the_parameters():
    config = load({"data_types": {"grad_accum_dtype": "bf16"}})
    assert replicated(config, SKETCH).gradients == 4 * 100 + 4 * 10 + 8 * 10  # fp16 and bf16 meet in fp32
    config = load({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}})
    assert replicated(config, SKETCH).gradients == 2 * 120


@pytest.mark.parametrize(
    ("name", "keys", "moments"),
    [("fp16", {}, 4), ("bf16", {}, 4), ("bf16", {"bf16_optimizer_states": True}, 2)],
)
def test_masters_in_the_parameters_own_dtype_are_free(name, keys, moments):
    section = {"enabled": True, f"{name}_master_weights_and_grads": True, **keys}
    cost = replicated(load({name: section, "zero_optimization": {"stage": 1}}), SKETCH)
    assert (cost.masters, cost.gradients, cost.states) == (0, 2 * 120, 2 * moments * 120)


def test_no_elements_cost_nothing():
    assert trained(0, "bfloat16", Policy("bfloat16", "float32", None), states=2) == Cost()


ARGUMENTS = [
    *((name, {}) for name in OPTIMIZERS),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.0}),
    ("AdamW", {"amsgrad": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("FusedAdam", {}),
    ("DeepSpeedCPUAdagrad", {}),
]


@pytest.mark.parametrize(("name", "arguments"), ARGUMENTS, ids=str)
def test_the_states_of_every_optimizer_are_counted(name, arguments):
    parameter = torch.nn.Parameter(torch.ones(64))
    parameter.grad = torch.ones(64)
    optimizer = build_optimizer(name, {"lr": 1e-3, **arguments}, [{"params": [parameter]}], device_type="cpu")
    optimizer.step()
    kept = [value for value in optimizer.state[parameter].values() if torch.is_tensor(value) and value.numel() == 64]
    config = load({"optimizer": {"type": name, "params": {"lr": 1e-3, **arguments}}})
    assert states_per_parameter(config) == len(kept)


def test_an_optimizer_of_the_users_counts_as_adam():
    assert states_per_parameter(load({})) == 2
