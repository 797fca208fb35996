"""Models on the meta device, filled from files: what is refused, and tensor-parallel ranks, which read their parts."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import mizzen
from mizzen.checkpoint.weight_files import WeightFiles
from mizzen.errors import CheckpointError

CONFIG = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "progress": {"enabled": False}}


class Small(nn.Module):
    """Two layers, and a buffer that is in no state dict."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, inputs):
        return (self.down(self.up(inputs).relu()) * self.scale).sum()


def on_meta(*, with_buffers):
    with torch.device("meta"):
        model = Small()
    if not with_buffers:
        model.scale = torch.full((4,), 2.0)
    return model


def fill(path, stage, tensor):
    """Whole values of one rank, and the bytes that it has read."""
    read, plain = [], WeightFiles.read

    def counted(files, name, *others):
        value = plain(files, name, *others)
        read.append(value.numel() * value.element_size())
        return value

    WeightFiles.read = counted
    more = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    more |= {"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}
    model = on_meta(with_buffers=False)
    known = [id(each) for each in model.parameters()]
    engine, *_ = mizzen.initialize(model=model, config={**CONFIG, "checkpoint": {"weights": path}, **more})
    assert [id(each) for each in engine.module.parameters()] == known or stage == 3
    engine.train_batch(iter([torch.ones(2 // engine.dp_world_size, 4)]))
    WeightFiles.read = plain
    named = engine.module.named_parameters()
    values = {name: mizzen.zero.safe_get_full_fp32_param(each).clone() for name, each in named}
    engine.destroy()
    return values, sum(read)


@pytest.fixture
def path(tmp_path):
    torch.manual_seed(1)
    save_file(Small().state_dict(), tmp_path / "weights.safetensors")
    return str(tmp_path / "weights.safetensors")


@pytest.mark.parametrize(("stage", "tensor"), [(1, 1), (3, 1), (0, 2)])
def test_ranks_read_what_they_keep_and_train_as_one_that_has_all(world, path, stage, tensor):
    ((expected, whole),) = world(1).run(fill, path, 0, 1)
    for values, read in world(2).run(fill, path, stage, tensor):
        assert read == whole if stage == 1 else read < 0.75 * whole
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def refused(path, what):
    model = on_meta(with_buffers=what == "buffers")
    if what == "weights":
        model.head = nn.Linear(4, 1, device="meta")
    with pytest.raises(CheckpointError) as caught:
        mizzen.initialize(model=model, config={**CONFIG, "checkpoint": {"weights": path}})
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("buffers", "'scale' is on the meta device, is in no file and cannot be computed here"),
        ("weights", "has no head.weight, head.bias, and the model has no values for it"),
    ],
)
def test_what_no_file_has_is_named(world, path, what, expected):
    (said,) = world(1).run(refused, path, what)
    assert expected in said
