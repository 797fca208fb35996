"""What every other test on a device relies on: arithmetic, our view of the device, and a rank that uses it."""

import torch
import torch.distributed as dist

from mizzen.accelerator import get_accelerator

BACKENDS = {"cuda": "nccl", "xpu": "xccl"}


def train_on(kind):
    """A step on the device of this rank, in a process forked from one that has never touched it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, device=kind, dtype=torch.bfloat16)
    loss = model(torch.ones(8, 64, device=kind, dtype=torch.bfloat16)).float().pow(2).mean()
    loss.backward()
    dist.all_reduce(model.weight.grad)
    return loss.item(), model.weight.grad.cpu()


def test_low_precision_products_agree_with_the_host(device):
    a, b = torch.randn(128, 256), torch.randn(256, 64)
    found = (a.to(device, torch.bfloat16) @ b.to(device, torch.bfloat16)).float().cpu()
    torch.testing.assert_close(found, a @ b, rtol=0.05, atol=0.5)


def test_our_accelerator_is_the_one_torch_has(device):
    assert get_accelerator().device().type == device.type


def test_a_forked_rank_can_use_the_device(world, device):
    torch.ones(1, device=device)  # this process has used it; the rank is not a child of this process
    ((loss, gradient),) = world(1, backend=BACKENDS.get(device.type, "gloo")).run(train_on, device.type)
    assert loss > 0 and gradient.abs().sum() > 0
