"""A classifier of small pictures, as the first tutorial of the field has it: convolutions, a loop, a configuration.

On one rank:  python examples/classifier.py
On two:       mizzen run --num_gpus 2 examples/classifier.py --stage 2
A schedule:   python examples/classifier.py --schedule range_test, then --schedule one_cycle
Its numbers:  python examples/classifier.py --monitor csv
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


SCHEDULES = {
    "warmup": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 20}},
    "range_test": {
        "type": "LRRangeTest",
        "params": {"lr_range_test_min_lr": 1e-5, "lr_range_test_step_size": 20, "lr_range_test_step_rate": 5},
    },
    "one_cycle": {
        "type": "OneCycle",
        "params": {
            **{"cycle_min_lr": 2e-4, "cycle_max_lr": 3e-3, "cycle_first_step_size": 50, "cycle_second_step_size": 50},
            **{"decay_lr_rate": 0.01, "decay_step_size": 20, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9},
        },
    },
}


def get_config(args: argparse.Namespace) -> dict:
    """A configuration as a dict; `mizzen config explain KEY` says what each key does."""
    config = {
        "train_batch_size": 32,
        "steps_per_print": 50,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "weight_decay": 3e-7}},
        "scheduler": SCHEDULES[args.schedule],
        "zero_optimization": {"stage": args.stage},
    }
    if args.dtype != "fp32":
        config[args.dtype] = {"enabled": True}
    if args.monitor is not None:
        key = "tensorboard" if args.monitor == "tensorboard" else "csv_monitor"
        config[key] = {"enabled": True, "output_path": "runs/classifier", "job_name": args.schedule}
    return config


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
    parser.add_argument("--schedule", default="warmup", choices=SCHEDULES)
    parser.add_argument("--monitor", choices=["csv", "tensorboard"], help="write the numbers of each step")
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
