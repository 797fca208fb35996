"""What ranks do with published files."""

import os

import torch

from drop_in import programs
from drop_in.published_files import TABLE, completed
from mizzen.errors import MizzenError


def initialized(folder):
    """For every file the error of `initialize`; what it does not refuse trains for a step."""
    os.chdir(folder)
    package = programs.deepspeed()
    return {name: outcome(package, name) for name in TABLE}


def outcome(package, name):
    torch.manual_seed(0)
    model = programs.Model()
    config = completed(name, int(os.environ["WORLD_SIZE"]))
    own = {} if "optimizer" in config else {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}
    try:
        engine, *_ = package.initialize(model=model, model_parameters=model.parameters(), config=config, **own)
    except MizzenError as error:
        return f"{type(error).__name__}\n{error}"
    dtype = next(model.parameters()).dtype
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 8, dtype=dtype)))
        engine.step()
    engine.destroy()
    return "trained"  # half precision may have skipped the step, to find its loss scale
