"""A loop of your own with Accelerate, its plugin made from arguments.

mizzen run --drop-in --no_local_rank --num_gpus 2 examples/clients/accelerate_loop.py
"""

import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(folder):
    on_cpu = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2, gradient_clipping=1.0)
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=on_cpu)

    torch.manual_seed(1)
    inputs = torch.randn(512, 16)
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))

    for epoch in range(4):
        for rows, wanted in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(rows), wanted)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"loss after epoch {epoch}: {accelerator.gather(loss.detach()).mean().item():.3f}")
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo-output/accelerate")
