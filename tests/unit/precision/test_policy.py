"""Which dtypes a configuration asks for."""

from itertools import product

import pytest
import torch

from mizzen.config.load import load
from mizzen.precision.policy import FLOATING, Policy, wider


def low(name, *, masters, enabled=True, **keys):
    """A section with masters and gradients in the low format."""
    section = {"enabled": enabled, f"{name}_master_weights_and_grads": masters, **keys}
    return {name: section, "zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("keys", "policy"),
    [
        ({}, Policy(None, "float32", None)),
        ({"bf16": {"enabled": True}}, Policy("bfloat16", "float32", None)),
        ({"fp16": {"enabled": True}}, Policy("float16", "float32", None)),
        ({"bf16": {"enabled": False}}, Policy(None, "float32", None)),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, Policy(None, "bfloat16", None)),
        ({"communication_data_type": "fp16"}, Policy(None, "float32", "float16")),
        ({"data_types": {"buffer_dtype": "fp32"}}, Policy(None, "float32", None, "float32")),
        ({"torch_autocast": {"enabled": True}}, Policy(None, "float32", None)),
        (low("bf16", masters=True), Policy("bfloat16", "bfloat16", None, masters="bfloat16")),
        (
            low("bf16", masters=True, bf16_optimizer_states=True),
            Policy("bfloat16", "bfloat16", None, masters="bfloat16", states="bfloat16"),
        ),
        (low("fp16", masters=True), Policy("float16", "float16", None, masters="float16")),
        (
            {**low("bf16", masters=True), "data_types": {"grad_accum_dtype": "fp32"}},
            Policy("bfloat16", "float32", None, masters="bfloat16"),
        ),
        (low("fp16", masters=True, enabled=False), Policy(None, "float32", None)),
        (low("bf16", masters=True, enabled=False, bf16_optimizer_states=True), Policy(None, "float32", None)),
    ],
)
def test_what_is_read(keys, policy):
    assert Policy.of(load(keys)) == policy


def test_only_floating_parameters_change():
    policy = Policy.of(load({"bf16": {"enabled": True}}))
    assert [policy.held(dtype) for dtype in FLOATING] == ["bfloat16"] * 4
    assert [policy.held(dtype) for dtype in ("int64", "uint8", "complex64", "float8_e4m3fn")] == [
        "int64",
        "uint8",
        "complex64",
        "float8_e4m3fn",
    ]


def test_nothing_changes_unless_asked():
    assert [Policy.of(load({})).held(dtype) for dtype in FLOATING] == list(FLOATING)


@pytest.mark.parametrize(("one", "other"), list(product(FLOATING, FLOATING)))
def test_wider_is_what_torch_promotes_to(one, other):
    promoted = torch.promote_types(vars(torch)[one], vars(torch)[other])
    assert f"torch.{wider(one, other)}" == str(promoted)
