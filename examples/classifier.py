"""A classifier of small pictures, as the first tutorial of the field has it: convolutions, a loop, a configuration.

On one rank:  python examples/classifier.py
On two:       mizzen run --num_gpus 2 examples/classifier.py --stage 2
"""

import argparse

import torch
from shapes import KINDS, shape_data
from torch import Tensor, nn
from torch.nn import functional

import mizzen


class Net(nn.Module):
    """Two convolutions and three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 12, 5, padding=2), nn.Conv2d(12, 24, 5, padding=2)
        self.layers = nn.Sequential(nn.Linear(24 * 4 * 4, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU())
        self.scores = nn.Linear(64, KINDS)

    def forward(self, pictures: Tensor) -> Tensor:
        """A score for each kind."""
        hidden = functional.max_pool2d(functional.relu(self.first(pictures)), 2)
        hidden = functional.max_pool2d(functional.relu(self.second(hidden)), 2)
        return self.scores(self.layers(hidden.flatten(1)))


def get_config(args: argparse.Namespace) -> dict:
    """A configuration as a dict; `mizzen config explain KEY` says what each key does."""
    config = {
        "train_batch_size": 32,
        "steps_per_print": 50,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 20}},
        "zero_optimization": {"stage": args.stage},
    }
    return config | ({args.dtype: {"enabled": True}} if args.dtype != "fp32" else {})


@torch.no_grad()
def accuracy(engine: mizzen.Engine) -> float:
    """The part of new pictures whose kind is found. Every rank looks at all of them."""
    pictures, kinds = shape_data(512, seed=1).tensors
    engine.eval()
    dtype = next(engine.parameters()).dtype
    found = engine(pictures.to(engine.device, dtype)).argmax(1).cpu()
    engine.train()
    return (found == kinds).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--stage", type=int, default=0, choices=[0, 1, 2, 3])
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--local_rank", type=int, default=-1, help="given by launchers")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Net()
    engine, _, loader, _ = mizzen.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=shape_data(args.samples),
        config=get_config(args),
    )
    dtype = next(engine.parameters()).dtype
    for epoch in range(args.epochs):
        for pictures, kinds in loader:
            scores = engine(pictures.to(engine.device, dtype))
            loss = functional.cross_entropy(scores.float(), kinds.to(engine.device))
            engine.backward(loss)
            engine.step()
        found = accuracy(engine)
        if engine.global_rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {100 * found:.0f} %", flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
