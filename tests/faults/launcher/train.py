"""A small training run that saves, resumes, and fails where it is told to. Losses go to a file, bit by bit."""

import argparse
import json
import os
import re
import signal
import time
from itertools import repeat
from pathlib import Path

import torch

import mizzen
import mizzen.pipe as pipe


class Net(torch.nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.first, self.drop, self.last = torch.nn.Linear(8, 16), torch.nn.Dropout(dropout), torch.nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.drop(self.first(x).relu())).square().mean()


def in_stages(stages):
    """The same layers as a pipeline; the loss needs no labels."""
    layers = [
        pipe.LayerSpec(torch.nn.Linear, 8, 16),
        torch.nn.ReLU(),
        pipe.LayerSpec(torch.nn.Dropout, 0.1),
        pipe.LayerSpec(torch.nn.Linear, 16, 1),
    ]
    return pipe.PipelineModule(layers, num_stages=stages, loss_fn=lambda output, _: output.square().mean())


class Block(torch.nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.drop = torch.nn.LayerNorm(8), torch.nn.Dropout(dropout)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + self.drop(self.down(self.up(self.norm(x)).relu()))


class Blocks(torch.nn.Module):
    """Blocks that the engine itself cuts into stages, and matrices that it cuts over ranks."""

    def __init__(self, dropout):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(dropout) for _ in range(2))
        self.last = torch.nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


class Data(torch.utils.data.Dataset):
    """Samples; one of them takes for ever in the worker of one rank, if so told."""

    def __init__(self, out, stuck=None):
        self.values = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
        self.out, self.stuck = out, stuck
        self.given = 0

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        self.given += 1
        if self.stuck is not None and self.given > self.stuck:
            (self.out / "fault.txt").write_text(str(time.time()))
            time.sleep(1000)
        return self.values[index]


def hold_the_lock():
    """Keep the interpreter's lock in compiled code, so that no other thread of this process runs."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def loop():
    while True:
        pass


FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "loop": loop,
    "lock": hold_the_lock,
    "raise": lambda: 1 / 0,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--evaluate", type=int, default=0)
    parser.add_argument("--batches", type=int, default=10, help="of an evaluation")
    parser.add_argument("--hang", type=float, default=0.0)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--stages", type=int, default=1, help="of a pipeline")
    parser.add_argument("--tensor", type=int, default=0, help="ranks that share a matrix, in a model of blocks")
    parser.add_argument("--layouts", type=json.loads, default=[], help="the degrees of other numbers of ranks")
    parser.add_argument("--faults", default="", help="kind@rank:step for the first attempt, and so on, by commas")
    given = parser.parse_args()
    faults, attempt = given.faults.split(","), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kind, _, place = faults[attempt].partition("@") if attempt < len(faults) else ("", "", "")
    who, at = map(int, place.split(":")) if place else (-1, -1)
    is_faulty = int(os.environ["RANK"]) == who

    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = Data(given.out, stuck=4 * at if kind == "sleep" and is_faulty else None)
    model = model_of(given)
    engine, _, _, _ = mizzen.initialize(model=model, model_parameters=model.parameters(), config=config_of(given))
    loader = engine.deepspeed_io(data, num_local_io_workers=1 if kind == "sleep" else 0)
    engine.set_dataloader(loader)
    if given.stages > 1 and not given.tensor:
        engine.set_batch_fn(lambda batch: (batch, batch))
    engine.register_client_state(lambda: {"seen": engine.global_steps})
    _, client = engine.resume_if_possible()
    rank = engine.global_rank
    if rank == 0:
        with (given.out / "starts.txt").open("a") as starts:
            starts.write(f"{time.time()} {engine.global_steps} {engine.world_size} {client}\n")
        degrees = (engine.settings.tensor_parallel.autotp_size, engine.settings.pipeline_parallel_size)
        print("tensor {} x stages {} x data {}".format(*degrees, engine.dp_world_size), flush=True)
    losses = (given.out / f"loss-{rank}.txt").open("a")
    while engine.global_steps < given.steps:
        for batch in loader if given.stages == 1 else repeat(None):
            if is_faulty and engine.global_steps == at and kind in FAULTS:
                (given.out / "fault.txt").write_text(str(time.time()))
                FAULTS[kind]()
            report = engine.train_batch() if batch is None else step(engine, batch)
            losses.write(f"{engine.global_steps} {report.loss.hex()}\n")
            losses.flush()
            time.sleep(given.pause)
            if engine.global_steps % given.every == 0:
                engine.save_checkpoint()
            if given.evaluate and engine.global_steps % given.evaluate == 0:
                evaluate(engine, data, given.out, given.batches)
            if engine.global_steps >= given.steps:
                break
    if rank == 0:
        print("done", flush=True)


def config_of(given):
    config = {
        "seed": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": given.stage},
        "checkpoint": {"dir": str(given.out / "checkpoints"), "keep_last": 2},
        "hang_timeout": given.hang,
        "deterministic": True,
    }
    config |= (
        {"elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2, 4, 8], "version": 0.1}}
        if given.elastic
        else {"train_batch_size": 8}
    )
    if given.tensor:
        config |= {"tensor_parallel": {"autotp_size": given.tensor}, "pipeline_parallel_size": given.stages}
        config["elasticity"] = {"layouts": given.layouts}
    if given.stages > 1:
        config["gradient_accumulation_steps"] = 4
    return config


def model_of(given):
    dropout = 0.0 if given.elastic or given.layouts else 0.1  # its numbers depend on the number of ranks
    if given.tensor:
        return Blocks(dropout)
    return Net(dropout) if given.stages == 1 else in_stages(given.stages)


def step(engine, batch):
    engine.backward(engine(batch))
    return engine.step()


def evaluate(engine, data, out, batches):
    engine.eval()
    (out / "evaluating").touch()
    with torch.no_grad():
        for number in range(batches):
            engine(data.values[number % 10 : number % 10 + 2])
            time.sleep(0.02)
    (out / "evaluating").unlink(missing_ok=True)
    engine.train()


main()
