"""In what a model computes when the engine calls it, and the devices that cannot."""

from collections import namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from mizzen.accelerator import DeviceInfo
from mizzen.config.load import load
from mizzen.errors import DeviceError
from mizzen.precision.arithmetic import Arithmetic, check_device
from mizzen.precision.scaler import Scaling

Pair = namedtuple("Pair", ["values", "ids"])


class Spy(nn.Module):
    """Returns what it was called with, and in what a matrix product of it comes out."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *args, **kwargs):
        return args, kwargs, self.layer(torch.ones(2, 4)).dtype


def arithmetic(**keys):
    return Arithmetic.of(load(keys), "cpu")


def autocast(dtype, **keys):
    return {"torch_autocast": {"enabled": True, "dtype": dtype}, **keys}


@pytest.mark.parametrize(
    ("keys", "computed"),
    [
        ({}, torch.float32),
        (autocast("bf16"), torch.bfloat16),
        (autocast("fp16"), torch.float16),
        ({"torch_autocast": {"enabled": False, "dtype": "bf16"}}, torch.float32),
    ],
)
def test_operations_of_the_forward(keys, computed):
    spy = Spy()
    *_, dtype = arithmetic(**keys).call(spy, (), {})
    assert dtype == computed
    assert spy.layer.weight.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("keys", "computed"), [({}, torch.float16), (autocast("bf16"), torch.bfloat16), (autocast("fp16"), torch.float16)]
)
def test_an_autocast_around_is_obeyed_unless_one_is_configured(keys, computed):
    with torch.autocast("cpu", dtype=torch.float16):
        *_, dtype = arithmetic(**keys).call(Spy(), (), {})
    assert dtype == computed


def test_a_model_may_leave_the_autocast_for_a_part():
    class Careful(Spy):
        def forward(self):
            with torch.autocast("cpu", enabled=False):
                return super().forward()

    *_, dtype = arithmetic(**autocast("bf16")).call(Careful(), (), {})
    assert dtype == torch.float32


def test_a_loss_is_computed_in_the_same_region():
    with arithmetic(**autocast("bf16")).region():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


INPUTS = (torch.ones(2), [torch.ones(1, dtype=torch.float64), torch.arange(3)], Pair(torch.ones(2), torch.arange(2)))
NAMED = {"mask": torch.tensor([True]), "nested": {"rows": torch.ones(1, dtype=torch.bfloat16)}, "flag": True}


def test_floating_inputs_are_cast_when_asked_for():
    args, kwargs, _ = arithmetic(fp16={"enabled": True, "auto_cast": True}).call(Spy(), INPUTS, NAMED)
    assert args[0].dtype == args[1][0].dtype == args[2].values.dtype == torch.float16
    assert kwargs["nested"]["rows"].dtype == torch.float16
    assert args[1][1].dtype == args[2].ids.dtype == torch.int64
    assert (kwargs["mask"].dtype, kwargs["flag"]) == (torch.bool, True)
    assert INPUTS[0].dtype == torch.float32


@pytest.mark.parametrize("fp16", [{"enabled": True}, {"auto_cast": True}, {}])
def test_otherwise_inputs_are_passed_as_they_are(fp16):
    args, kwargs, _ = arithmetic(fp16=fp16).call(Spy(), INPUTS, NAMED)
    assert all(one is other for one, other in zip(args, INPUTS, strict=True))
    assert all(kwargs[key] is value for key, value in NAMED.items())


def test_the_scaler_is_that_of_the_configuration():
    assert arithmetic(fp16={"enabled": True, "loss_scale": 8}).scaler.settings == Scaling(8.0)
    assert not arithmetic(**autocast("bf16")).scaler.is_on
    assert arithmetic(**autocast("fp16")).scaler.settings.is_dynamic


@dataclass
class Device:
    """As much of an accelerator as is asked."""

    computes: set = field(default_factory=set)
    name: str = "toy"

    def supports(self, dtype):
        return dtype in self.computes

    def describe(self):
        return DeviceInfo("Abacus 2000", "beads")


@pytest.mark.parametrize(
    ("keys", "path", "dtype"),
    [
        ({"fp16": {"enabled": True}}, "fp16.enabled", "float16"),
        ({"bf16": {"enabled": True}}, "bf16.enabled", "bfloat16"),
        (autocast("fp16"), "torch_autocast.dtype", "float16"),
        (autocast("bf16"), "torch_autocast.dtype", "bfloat16"),
    ],
)
def test_a_format_that_the_device_lacks_is_refused_by_its_key(keys, path, dtype):
    with pytest.raises(DeviceError) as caught:
        check_device(load(keys), Device())
    assert str(caught.value) == (
        f"{path}: Abacus 2000 (toy) does not compute in {dtype}: use another format, or leave the section out for fp32"
    )
    check_device(load(keys), Device({torch.float16, torch.bfloat16}))


def test_nothing_is_asked_of_a_device_for_what_is_off():
    check_device(load({"fp16": {"enabled": False}, "torch_autocast": {"enabled": False}}), Device())
