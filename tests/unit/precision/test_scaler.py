"""The rules by which a loss scale moves, as tables of what happened and where it then stands."""

import math

import pytest
import torch

from mizzen.config.load import load
from mizzen.errors import StepError, UsageError
from mizzen.precision.scaler import LossScaler, Scaling


def dynamic(**keys):
    return Scaling(**{"initial": 16.0, "is_dynamic": True, "window": 3, "hysteresis": 1, **keys})


def trace(settings, events):
    """The scale after each of some steps: + was taken, - was skipped, ! cannot be answered."""
    scaler = LossScaler(settings)
    scales = []
    for event in events:
        if event == "+":
            scaler.taken()
        elif event == "-":
            scaler.skipped("why")
        else:
            with pytest.raises(StepError):
                scaler.skipped("why")
        scales.append(scaler.scale)
    return scales


SEQUENCES = {
    "doubled after every window": (dynamic(), "+++++++", [16, 16, 32, 32, 32, 64, 64]),
    "a window of one": (dynamic(window=1), "++", [32, 64]),
    "halved at once": (dynamic(), "--", [8, 4]),
    "an overflow starts the window again": (dynamic(), "++-+++", [16, 16, 8, 8, 8, 16]),
    "not below the minimum": (dynamic(least=5.0), "--", [8, 5]),
    "an error at the minimum, and again": (dynamic(least=8.0), "-!!", [8, 8, 8]),
    "a clean step at the minimum": (dynamic(least=8.0, window=2), "-+!++", [8, 8, 8, 8, 16]),
    "hysteresis keeps the scale first": (dynamic(hysteresis=3), "----", [16, 16, 8, 4]),
    "hysteresis adds up over clean steps": (dynamic(hysteresis=2), "-+-+-", [16, 16, 8, 8, 4]),
    "it starts the window again too": (dynamic(hysteresis=2), "++-+++", [16, 16, 16, 16, 16, 32]),
    "hysteresis is full again after a raise": (dynamic(hysteresis=2), "-+++--", [16, 16, 16, 32, 32, 16]),
    "consecutive hysteresis: a clean step fills it": (
        dynamic(hysteresis=2, is_consecutive=True),
        "-+-+--",
        [16, 16, 16, 16, 16, 8],
    ),
    "after halving, every overflow in a row halves": (
        dynamic(hysteresis=2, is_consecutive=True),
        "---+-",
        [16, 8, 4, 4, 4],
    ),
    "hysteresis comes before the error": (dynamic(hysteresis=2, least=16.0), "-!", [16, 16]),
    "a fixed scale": (Scaling(128.0), "+++----", [128] * 7),
    "none": (Scaling(), "+-", [1, 1]),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_where_the_scale_stands(name):
    settings, events, expected = SEQUENCES[name]
    assert trace(settings, events) == expected


def test_the_error_says_where_why_and_what_to_do():
    with pytest.raises(StepError) as caught:
        LossScaler(dynamic(initial=0.5, least=0.5)).skipped("gradient not finite on rank 1: head.weight")
    assert str(caught.value) == (
        "the loss scale is at its minimum, 0.5, and gradients still overflow: gradient not finite on rank 1: "
        "head.weight. Lower the learning rate, check the data, use bf16, or lower fp16.min_loss_scale"
    )


SETTINGS = [
    ({}, Scaling()),
    ({"bf16": {"enabled": True}, "fp16": {"loss_scale": 8}}, Scaling()),
    ({"fp16": {"enabled": False}}, Scaling()),
    ({"fp16": {"enabled": True}}, Scaling(2.0**16, True, 1000, 2, False, 1.0)),
    ({"fp16": {"enabled": True, "loss_scale": 128}}, Scaling(128.0)),
    (
        {
            "fp16": {
                "enabled": True,
                "initial_scale_power": 4,
                "loss_scale_window": 7,
                "hysteresis": 3,
                "consecutive_hysteresis": True,
                "min_loss_scale": 0.25,
            }
        },
        Scaling(16.0, True, 7, 3, True, 0.25),
    ),
    ({"torch_autocast": {"enabled": True, "dtype": "bf16"}}, Scaling()),
    ({"torch_autocast": {"enabled": False, "dtype": "fp16"}}, Scaling()),
    (
        {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"initial_scale_power": 8}},
        Scaling(256.0, True, 1000, 2, False, 1.0),
    ),
    ({"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"loss_scale": 2}}, Scaling(2.0)),
]


@pytest.mark.parametrize(("keys", "settings"), SETTINGS, ids=lambda value: str(value)[:50])
def test_what_is_read(keys, settings):
    assert Scaling.of(load(keys)) == settings


@pytest.mark.parametrize(
    ("settings", "is_on"), [(Scaling(), False), (Scaling(2.0), True), (dynamic(), True), (dynamic(initial=1.0), True)]
)
def test_when_a_bare_loss_is_wrong(settings, is_on):
    assert LossScaler(settings).is_on is is_on


@pytest.mark.parametrize(
    ("dtype", "result"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_a_loss_is_scaled_where_the_product_fits(dtype, result):
    loss = torch.tensor(3.0, dtype=dtype, requires_grad=True)
    scaled = LossScaler(Scaling(2.0**20)).scaled(loss)
    assert (scaled.item(), scaled.dtype) == (3.0 * 2**20, result)


def test_without_a_scale_the_loss_is_left_alone():
    loss = torch.tensor(3.0, dtype=torch.float16)
    assert LossScaler(Scaling()).scaled(loss) is loss


@pytest.mark.parametrize(
    ("settings", "loss", "may"),
    [
        (dynamic(), 2.0, True),
        (dynamic(), None, True),  # a backward of the user's own: the loss was never seen
        (dynamic(), math.nan, False),
        (dynamic(), math.inf, False),
        (Scaling(128.0), 2.0, False),
        (Scaling(), 2.0, False),
    ],
)
def test_what_a_lower_scale_may_cure(settings, loss, may):
    assert LossScaler(settings).may_cure(loss) is may


def test_an_override_is_fixed():
    scaler = LossScaler(dynamic())
    scaler.override(4)
    assert (scaler.scale, scaler.is_on, scaler.may_cure(1.0)) == (4.0, True, False)
    scaler.skipped("why")
    for _ in range(10):
        scaler.taken()
    assert scaler.scale == 4.0


@pytest.mark.parametrize("scale", [0, -1.0, math.inf, math.nan, True, "2", None])
def test_an_override_is_a_positive_number(scale):
    with pytest.raises(UsageError, match="a loss scale is a finite number above 0; this is"):
        LossScaler(Scaling()).override(scale)


def test_no_override_between_backward_and_step():
    scaler = LossScaler(dynamic())
    scaler.scaled(torch.tensor(1.0))
    with pytest.raises(UsageError, match=r"already scaled by 16: set another scale right after step\(\)"):
        scaler.override(4)
    scaler.has_scaled = False
    scaler.override(4)


def test_a_saved_scaler_goes_on_as_the_first_would():
    settings = dynamic(hysteresis=3, window=4)
    first = LossScaler(settings)
    for _ in range(2):
        first.skipped("why")
    first.taken()
    second = LossScaler(settings)
    second.load_state_dict(first.state_dict())
    for scaler in (first, second):
        scaler.taken()
        scaler.taken()
    assert first.scale == second.scale == 16
    for scaler in (first, second):
        scaler.taken()
    assert first.state == second.state
    assert first.scale == 32


def test_what_is_saved_are_plain_numbers():
    assert LossScaler(dynamic()).state_dict() == {"scale": 16.0, "clean": 0, "patience": 1}


def test_settings_that_changed_since_hold():
    saved = {"scale": 2.0, "clean": 900, "patience": 5}
    scaler = LossScaler(dynamic(least=4.0, hysteresis=2, window=10))
    scaler.load_state_dict(saved)
    assert (scaler.scale, scaler.state.patience) == (4.0, 2)
    scaler.taken()
    assert scaler.scale == 8.0
    fixed = LossScaler(Scaling(128.0))
    fixed.load_state_dict(saved)
    assert fixed.scale == 128.0
