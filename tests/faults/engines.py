"""`make faults-engines`: many engines in a row, and what the last of them leaves behind in its process."""

import argparse
import gc
import itertools
import time

import psutil
import torch
from torch import nn
from torch.distributed.distributed_c10d import _world

import mizzen
from pool import Pool, World

ENDINGS = ("destroyed", "dropped", "dropped in mid-step")
STAGES = (0, 1, 2, 3)
SLACK = {"tensors": 8}
"""The threads of gloo keep the tensors of the last thing they did. One tensor for each of twelve engines is more."""


def left_behind():
    """What of a process grows when something is not given back."""
    while gc.collect():
        pass
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    process = psutil.Process()
    return {
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "groups": len(_world.pg_map),
        "tensors": len(tensors),
    }


def live(stage, ending):
    """One engine from its first breath to its end."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "progress": {"enabled": False},
    }
    engine, *_ = mizzen.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(3 if ending == "dropped in mid-step" else 2):
        engine.backward(engine(torch.ones(2, 16)).sum())
        engine.step()
    if ending == "destroyed":
        engine.destroy()


def engines_in_a_row(stage, endings, count):
    """What grew from the first engines to the last: {what: (before, after)}."""
    for ending in (*endings, *endings):  # what is made once for all engines is made now
        live(stage, ending)
    before = left_behind()
    for ending in itertools.islice(itertools.cycle(endings), count):
        live(stage, ending)
    after = left_behind()
    return {what: (before[what], after[what]) for what in before if after[what] > before[what] + SLACK.get(what, 0)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="engines of each kind")
    count, pool, failed = parser.parse_args().count, Pool(), 0
    print(f"{'engines in a row, on two ranks':58} {'tries':>6} {'failures':>9} {'seconds':>8}")
    for stage, ending in itertools.product(STAGES, ENDINGS):
        started = time.perf_counter()
        grown = [
            found
            for found in World(pool, 2, "gloo").run(engines_in_a_row, stage, (ending,), count, timeout=600)
            if found
        ]
        name = f"stage {stage}, {ending}"
        print(f"{name:58} {count:6} {len(grown):9} {time.perf_counter() - started:8.1f}", flush=True)
        for found in grown:
            print(f"    {found}")
        failed += len(grown)
    pool.close()
    return 1 if failed else 0


if __name__ == "__main__":
    from faults import engines  # ranks look for functions in the module of that name

    raise SystemExit(engines.main())
