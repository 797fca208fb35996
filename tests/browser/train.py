"""A small run of real ranks, started by `mizzen run`: it trains, saves, and may lose a rank or skip a step."""

import argparse
import os
import signal
import time

import torch

import mizzen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--name", default="run")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--overflow-at", type=int, default=-1)
    parser.add_argument("--kill-rank", type=int, default=-1)
    parser.add_argument("--kill-at", type=int, default=-1)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64))
    engine, *_ = mizzen.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01}},
            "zero_optimization": {"stage": 2},
            "wall_clock_breakdown": True,
            "jsonl_monitor": {
                "enabled": True,
                "output_path": arguments.folder,
                "job_name": arguments.name,
                "heartbeat": 0.2,
            },
        },
    )
    folder = f"{arguments.folder}/{arguments.name}-checkpoints"
    engine.resume_if_possible(folder) if os.path.isdir(folder) else None
    while engine.global_steps < arguments.steps:
        tokens = torch.randint(64, (4, 16))
        output = engine(tokens)
        loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten())
        if engine.global_steps + 1 == arguments.overflow_at and engine.skipped_steps == 0:
            loss = loss * float("inf")
        engine.backward(loss)
        engine.step()
        time.sleep(arguments.pause)
        if engine.global_steps % 15 == 0 and engine.step_was_due:
            engine.save_checkpoint(folder)
        if engine.global_steps == arguments.kill_at and engine.global_rank == arguments.kill_rank:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
