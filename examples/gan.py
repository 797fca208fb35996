"""Two engines in one loop: a generator draws small pictures, a discriminator tells them from real ones.

On one rank:  python examples/gan.py
On two:       mizzen run --num_gpus 2 examples/gan.py
"""

import argparse

import torch
from shapes import SIDE, shape_data
from torch import Tensor, nn
from torch.nn import functional

import mizzen

NOISE = 32


def generator() -> nn.Module:
    """From noise to a picture."""
    layers = [nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 3 * SIDE * SIDE)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Unflatten(1, (3, SIDE, SIDE)))


def discriminator() -> nn.Module:
    """From a picture to how real it is."""
    layers = [nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4 * 4, 1))


def start(model: nn.Module, stage: int) -> mizzen.Engine:
    """Each model has an engine, an optimizer and a step of its own."""
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "optimizer": {"type": "Adam", "params": {"lr": 2e-4, "betas": [0.5, 0.999]}},
        "zero_optimization": {"stage": stage},
        "progress": {"enabled": False},
    }
    return mizzen.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def real(scores: Tensor) -> Tensor:
    """The loss of scores that should say 'real'."""
    return functional.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))


def fake(scores: Tensor) -> Tensor:
    """The loss of scores that should say 'drawn'."""
    return functional.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stage", type=int, default=1, choices=[0, 1, 2, 3])
    parser.add_argument("--local_rank", type=int, default=-1, help="given by launchers")
    args = parser.parse_args()

    torch.manual_seed(0)
    painter, critic = start(generator(), args.stage), start(discriminator(), args.stage)
    pictures = mizzen.RepeatingLoader(painter.deepspeed_io(shape_data(2048)))
    for step in range(1, args.steps + 1):
        shown = next(pictures)[0].to(critic.device)
        drawn = painter(torch.randn(len(shown), NOISE, device=painter.device))

        # The critic learns from both. What it learns of drawn pictures is not the painter's business: detach.
        critic_loss = real(critic(shown)) + fake(critic(drawn.detach()))
        critic.backward(critic_loss)
        critic.step()

        # The painter learns through the critic, whose own gradients are then thrown away.
        painter_loss = real(critic(drawn))
        painter.backward(painter_loss)
        painter.step()
        critic.zero_grad()
        if step % 50 == 0 and painter.global_rank == 0:
            print(f"step {step}: critic {critic_loss.item():.3f}, painter {painter_loss.item():.3f}", flush=True)
    for engine in (painter, critic):
        engine.destroy()


if __name__ == "__main__":
    main()
