"""Autocast and input casts in an engine: what the model sees, in the open loop and in train_batch."""

import pytest
import torch
from torch import nn

import mizzen

BASE = {
    "train_batch_size": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "progress": {"enabled": False},
    "gradient_clipping": 0.0,
}


class Watcher(nn.Module):
    """Remembers in what its layers computed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("table", torch.ones(4))
        self.seen: list[torch.dtype] = []

    def forward(self, rows):
        hidden = self.layer(rows)
        self.seen.append(hidden.dtype)
        return self.norm(hidden)


def start(**keys):
    return mizzen.initialize(model=Watcher(), config=BASE | keys)[0]


def watch(stage: int, dtype: str) -> dict:
    engine = start(
        torch_autocast={"enabled": True, "dtype": dtype},
        fp16={"initial_scale_power": 4},
        zero_optimization={"stage": stage},
    )
    losses: list[torch.dtype] = []

    def loss_function(output, target):
        losses.append((output @ target.T).dtype)  # a product shows whether autocast is on
        return (output.float() - target).pow(2).mean()

    rows = torch.arange(8.0).view(2, 4) / 8
    engine.backward(engine(rows).float().pow(2).mean())
    first = engine.step()
    second = engine.train_batch(iter([(rows, rows)]), loss_function)
    parameter = engine.module.layer.weight
    return {
        "applied": first.applied and second.applied,
        "seen": engine.module.seen,
        "losses": losses,
        "held": (parameter.dtype, engine.stores[0].buckets[0].gradient.dtype),
        "scale": engine.loss_scale(),
        "outside": (rows @ rows.T).dtype,
    }


@pytest.mark.parametrize(("dtype", "low", "scale"), [("bf16", torch.bfloat16, 1.0), ("fp16", torch.float16, 16.0)])
@pytest.mark.parametrize("stage", [0, 2])
def test_the_model_and_its_loss_run_under_autocast_and_parameters_stay(world, stage, dtype, low, scale):
    for found in world(2).run(watch, stage, dtype):
        assert found["applied"]
        assert found["seen"] == [low, low]
        assert found["losses"] == [low]
        assert found["held"] == (torch.float32, torch.float32)
        assert found["scale"] == scale
        assert found["outside"] == torch.float32


def nested() -> list[torch.dtype]:
    seen = []
    for keys in ({}, {"torch_autocast": {"enabled": True, "dtype": "bf16"}}):
        engine = start(**keys)
        with torch.autocast("cpu", dtype=torch.float16):
            engine(torch.ones(2, 4))
        seen += engine.module.seen
    return seen


def test_an_autocast_of_the_users_own_holds_unless_one_is_configured(world):
    assert world(1).run(nested) == [[torch.float16, torch.bfloat16]]


def inputs(auto_cast: bool) -> list[torch.dtype]:
    engine = start(fp16={"enabled": True, "auto_cast": auto_cast})
    engine(torch.ones(2, 4))
    return engine.module.seen


def test_inputs_are_cast_to_fp16_when_asked_for(world):
    assert world(1).run(inputs, True) == [[torch.float16]]
    with pytest.raises(AssertionError, match="must have the same dtype"):
        world(1).run(inputs, False)


def buffers(dtype: str | None) -> list[torch.dtype]:
    keys = {"data_types": {"buffer_dtype": dtype}} if dtype else {}
    engine = start(fp16={"enabled": True}, **keys)
    return [engine.module.table.dtype, engine.module.layer.weight.dtype]


def test_buffers_keep_their_dtype_unless_asked_otherwise(world):
    assert world(1).run(buffers, None) == [[torch.float32, torch.float16]]
    assert world(1).run(buffers, "fp16") == [[torch.float16, torch.float16]]


def unsupported() -> str:
    from mizzen.accelerator import get_accelerator

    get_accelerator().supports = lambda dtype: dtype != torch.float16
    model = Watcher()
    with pytest.raises(mizzen.errors.DeviceError) as caught:
        mizzen.initialize(model=model, config=BASE | {"fp16": {"enabled": True}})
    assert model.layer.weight.dtype == torch.float32  # nothing has been changed yet
    return str(caught.value)


def test_a_device_without_fp16_is_said_before_anything_is_changed(world):
    (message,) = world(1).run(unsupported)
    assert message.startswith("fp16.enabled: ")
    assert message.endswith("(cpu) does not compute in float16: use another format, or leave the section out for fp32")
