"""Unmodified models of transformers under tensor parallelism, pipelines, ZeRO and data ranks, by the configuration."""

import json
import os
import sys
from pathlib import Path

import torch

import mizzen
from clients.drive_tensor import FUSED, RATE, RECOMPUTE, SAMPLES, STEPS, batch, built, reference
from clients.layout_files import KINDS, exchange

CASES = (
    ("llama", 1, {}),
    ("gpt2", 3, {}),
    ("qwen2", 1, {}),
    ("mistral", 3, {}),
    ("llama", 3, {}),
    ("gpt2", 1, {}),
    ("qwen2", 3, FUSED | RECOMPUTE),
    ("mistral", 1, {"gradient_accumulation_steps": 4, "pipeline": {"schedule": "zero_bubble"}}),
)
"""Model, ZeRO stage, more keys; dp is whatever 2 x 2 leave of the ranks."""
FOR_SHORT = 4
"""How many of them eight ranks take, unless all are asked for."""


def split(kind: str, stage: int, more: dict) -> dict:
    """What a user writes; how far what this rank holds is from one process, by the names of the whole model."""
    model = built(kind)
    names = {id(value): name for name, value in model.named_parameters()}
    every = {alias: names[id(value)] for alias, value in model.named_parameters(remove_duplicate=False)}
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    config = {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"autotp_size": 2},
        "pipeline_parallel_size": 2,
        "progress": {"enabled": False},
        "seed": 1,
    }
    engine, *_ = mizzen.initialize(model=model, config=config | more)
    losses, norms = [], []
    for step in range(STEPS):
        ranks, rank, parts = engine.dp_world_size, engine.get_data_parallel_rank(), engine.gradient_accumulation_steps()
        mine = {name: value.chunk(ranks)[rank].chunk(parts) for name, value in batch(model, step).items()}
        report = engine.train_batch(
            iter([dict(zip(mine, part, strict=True)) for part in zip(*mine.values(), strict=True)])
        )
        losses.append(report.loss)
        norms.append(report.grad_norm)
    expected, wanted, moves = reference(kind, 0.0)
    far = {}
    for name, parameter in engine.module.named_parameters():
        whole, size = moves[every[name]], moves[every[name]].norm()
        value = mizzen.zero.safe_get_full_fp32_param(parameter)
        far[every[name]] = float((value - before[every[name]] - whole).norm() / size) if size > 1e-7 else 0.0
    engine.destroy()
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
        "norm": max(abs(a - b) / abs(b) for a, b in zip(norms, wanted, strict=True)),
        "updates": far,
        "names": list(before),
    }


def main() -> None:
    """All cases one after the other."""
    torch.set_num_threads(1)
    found = {}
    everything = int(os.environ["WORLD_SIZE"]) == 4 or os.environ.get("FULL")
    for kind, stage, more in CASES if everything else CASES[:FOR_SHORT]:
        found[f"{kind} stage={stage} {json.dumps(more)}"] = split(kind, stage, more)
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if int(os.environ["WORLD_SIZE"]) == 4:
        (folder / f"{rank}-files.json").write_text(json.dumps({kind: exchange(kind, folder) for kind in KINDS}))


if __name__ == "__main__":
    main()
