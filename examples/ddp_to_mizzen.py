"""Data-parallel training, twice: `ddp.py` as torch has it, `ddp_to_mizzen.py` with ZeRO stage 2.

`diff examples/ddp.py examples/ddp_to_mizzen.py` shows what the change takes. Each runs as it is, on one rank, and with
`python -m torch.distributed.run --standalone --nproc-per-node 2` before its name on two.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mizzen


def join() -> torch.device:
    """Meet the other ranks, if there are any, and choose the device of this one."""
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(dist.get_node_local_rank(fallback_rank=0))
    return torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())


def next_bytes(file: Path, context: int) -> TensorDataset:
    """(some bytes, the byte that follows them), for every place in a file."""
    windows = torch.tensor(list(file.read_bytes())).unfold(0, context + 1, 1)
    return TensorDataset(windows[:, :-1], windows[:, -1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    device = join()
    torch.manual_seed(0)
    layers = nn.Embedding(256, 32), nn.Flatten(), nn.Linear(16 * 32, 512), nn.ReLU(), nn.Linear(512, 256)
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"train_micro_batch_size_per_gpu": 64, "gradient_clipping": 0, "zero_optimization": {"stage": 2}}
    model, optimizer, _, _ = mizzen.initialize(model=model, optimizer=optimizer, config=config)

    data = next_bytes(Path(argparse.__file__), context=16)
    loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
    for step, (inputs, targets) in zip(range(1, args.steps + 1), loader, strict=False):
        loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        model.backward(loss)
        model.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
