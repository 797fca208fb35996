"""One rank of `bench.slow_link`: all systems stand ready in one process and take turns of one step."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import mizzen

QUANTIZED: Final = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
SYSTEMS: Final[dict[str, dict[str, Any]]] = {
    "stage 3": {},
    "qwZ": {"zero_quantized_weights": True},
    "qgZ": {"zero_quantized_gradients": True},
    "qwZ + qgZ": QUANTIZED,
    "ZeRO++": {**QUANTIZED, "zero_hpz_partition_size": 0},
}
"""Keys of `zero_optimization`; the ranks of a node take the place of a 0."""


class Stack(nn.Module):
    """Square layers: much to send for little to compute."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """A loss."""
        hidden = rows
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return (hidden - rows.flip(1)).square().mean()


def build(keys: dict[str, Any], width: int, layers: int, inside: int) -> Any:
    """An engine."""
    torch.manual_seed(0)
    zero = {"stage": 3, "stage3_param_persistence_threshold": width + 1, **keys}
    zero = {key: inside if value == 0 and key == "zero_hpz_partition_size" else value for key, value in zero.items()}
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "progress": {"enabled": False},
    }
    return mizzen.initialize(model=Stack(width, layers), config=config)[0]


def sent(device: str) -> int:
    """Bytes that have left this node, as the kernel counts them."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            return int(numbers.split()[8])
    raise RuntimeError(f"no device {device}")


def turn(engine: Any, step: int, width: int) -> float:
    """One step; its loss."""
    generator = torch.Generator().manual_seed(100 * step + engine.global_rank)
    loss = engine(torch.randn(8, width, generator=generator))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def main() -> None:
    """Play all rounds; rank 0 prints what was measured, in one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("settings", type=json.loads)
    parser.add_argument("--inside", type=int, required=True)
    parser.add_argument("--systems", nargs="+", required=True)
    options = parser.parse_args()
    width, layers, rounds = (options.settings[key] for key in ("width", "layers", "rounds"))
    names = [name for name in options.systems if options.inside > 1 or 0 not in SYSTEMS[name].values()]
    mizzen.init_distributed()
    engines = {name: build(SYSTEMS[name], width, layers, options.inside) for name in names}
    found: dict[str, dict[str, Any]] = {name: {"turns": [], "bytes": 0, "loss": 0.0} for name in names}
    for number in range(-1, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            torch.distributed.barrier()
            before, start = sent(options.device), time.perf_counter()
            loss = turn(engines[name], number, width)
            torch.distributed.barrier()
            seconds, bytes_ = time.perf_counter() - start, sent(options.device) - before
            if number >= 0:  # the first is for warming up
                found[name]["turns"].append([seconds])
                found[name]["bytes"] += bytes_ / rounds
                found[name]["loss"] = loss
    if torch.distributed.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
