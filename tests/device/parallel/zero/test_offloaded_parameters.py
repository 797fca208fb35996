"""Parameters that rest outside the device: the same training, and no more of them on the device than are in use."""

import pytest
import torch
from torch import nn

import mizzen
from mizzen import zero

LAYERS, WIDTH, STEPS = 8, 512, 6


def build():
    torch.manual_seed(0)
    # Without biases: that of keys has no gradient but noise, which AdamW turns into whole steps.
    layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True, bias=False)
    return nn.Sequential(nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False), nn.Linear(WIDTH, 1))


def start(model, **offload):
    config = {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 1,
            "offload_optimizer": {"device": "cpu"},
            **offload,
        },
        "offload": {"device_bytes": 0, "streamed_ratio": 0.0},  # a share that is measured differs from run to run
        "progress": {"enabled": False},
    }
    return mizzen.initialize(model=model, config=config)[0]


def rows(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 16, WIDTH, generator=generator).cuda().bfloat16()


def train(engine):
    losses = []
    for step in range(STEPS):
        loss = engine(rows(step)).float().square().mean()
        engine.backward(loss)
        report = engine.step()
        assert report.applied, report.reason
        losses.append(float(loss))
    return losses, [zero.safe_get_full_fp32_param(p).cpu() for p in engine.module.parameters()]


def peak_of_forward(engine):
    """The most that a forward takes on the device, beside what was there."""
    with torch.no_grad():
        engine(rows(0))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine(rows(0))
        torch.cuda.synchronize()
        return before, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_training_does_not_depend_on_where_parameters_rest(place, tmp_path):
    before = [p.detach().clone() for p in build().parameters()]
    plain = start(build())
    losses, values = train(plain)
    plain.destroy()
    del plain
    torch.cuda.synchronize()
    others_have = torch.cuda.memory_allocated()  # such as the workspaces of products
    param = {"device": place, "nvme_path": str(tmp_path), "max_in_cpu": 0}
    engine = start(build(), offload_param=param)
    found, others = train(engine)
    assert found == pytest.approx(losses, rel=1e-3)
    for first, value, other in zip(before, values, others, strict=True):
        update = value - first
        assert (other - value).norm() <= 5e-2 * update.norm()
    resting, peak = peak_of_forward(engine)
    total = 2 * sum(p.numel() for p in engine.module.parameters())
    assert resting - others_have < total / 4, "what rests on the device"
    assert peak - others_have < total, "what a forward takes there"


def test_a_model_is_built_without_ever_being_whole_on_the_device():
    total = sum(p.numel() for p in build().parameters())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with zero.Init(remote_device="cpu", dtype=torch.bfloat16):
        model = build()
    engine = start(model, offload_param={"device": "cpu"})
    assert torch.cuda.max_memory_allocated() - before < 2 * total
    losses, _ = train(engine)
    plain = start(build().bfloat16())
    assert losses == pytest.approx(train(plain)[0], rel=2e-2)
