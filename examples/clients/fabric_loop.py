"""A loop of your own with Fabric. Its strategy wants CUDA; on a CPU this script says so and ends.

mizzen run --drop-in --no_local_rank --num_gpus 2 examples/clients/fabric_loop.py
"""

import sys

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3},
}


def main(folder, strategy, accelerator, devices):
    fabric = Fabric(accelerator=accelerator, devices=devices, strategy=strategy)
    fabric.launch()
    with fabric.init_module():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    chance = torch.Generator().manual_seed(fabric.global_rank)
    for step in range(1, 61):
        rows = torch.randn(16, 16, generator=chance).to(fabric.device)
        loss = nn.functional.mse_loss(model(rows), rows.square().sum(1, keepdim=True))
        fabric.backward(loss, model=model)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            fabric.print(f"loss after {step} steps: {loss.item():.3f}")
    state = {"model": model, "optimizer": optimizer, "step": step}
    fabric.save(folder, state)
    fabric.load(folder, state)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("the strategy of Fabric for this needs CUDA")
    place = sys.argv[1] if len(sys.argv) > 1 else "demo-output/fabric"
    main(place, DeepSpeedStrategy(config=CONFIG), "cuda", torch.cuda.device_count())
