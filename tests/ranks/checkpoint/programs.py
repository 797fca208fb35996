"""Engines that save and load: tiny models with uneven shapes, and what they hold, gathered."""

import logging
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

import mizzen
from mizzen.checkpoint.read import Reader, compare
from mizzen.engine.access import full_state, full_value

WIDTH, CLASSES, TRAIN = 10, 7, 12


@dataclass(frozen=True)
class Case:
    """How one engine is made."""

    stage: int = 0
    copies: int = 1
    dtype: str = "fp32"
    optimizer: str = "AdamW"
    frozen: bool = False
    dropout: float = 0.0
    checkpoint: dict[str, Any] = field(default_factory=dict)
    scheduler: bool = True
    tied: bool = False

    @property
    def config(self) -> dict[str, Any]:
        params = {"SGD": {"lr": 1e-2, "momentum": 0.9}, "Muon": {"lr": 1e-2}}.get(self.optimizer, {"lr": 1e-2})
        zero = {"stage": self.stage, "reduce_bucket_size": 90, "stage3_param_persistence_threshold": 8}
        found: dict[str, Any] = {
            "train_batch_size": TRAIN,
            "optimizer": {"type": self.optimizer, "params": params},
            "zero_optimization": zero,
            "seed": 5,
            "progress": {"enabled": False},
            "checkpoint": self.checkpoint,
        }
        if self.copies > 1:
            found["data_parallel_replicate_size"] = self.copies
        if self.scheduler:
            found["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 1e-2}}
        if self.dtype == "bf16":
            found["bf16"] = {"enabled": True}
        if self.dtype == "fp16":
            found["fp16"] = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}
        return found


class Model(nn.Module):
    """Odd sizes, a 0-d parameter, a buffer that changes, an unused parameter."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 13)
        self.blocks = nn.ModuleList(nn.Linear(13, 13, bias=number % 2 == 0) for number in range(3))
        self.norm = nn.LayerNorm(13)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.down = nn.Linear(13, CLASSES)
        self.dropout = nn.Dropout(case.dropout)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        if case.frozen:
            self.up.requires_grad_(False)
        if case.tied:
            self.blocks[2].weight = self.blocks[0].weight

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        hidden = self.up(inputs.to(self.up.weight.dtype))
        for block in self.blocks:
            hidden = hidden + self.dropout(functional.gelu(block(hidden)))
        return functional.cross_entropy(self.down(self.gain * self.norm(hidden)).float(), labels)


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), index % CLASSES


def build(case: Case, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    return mizzen.initialize(model=Model(case), config=case.config, training_data=Data())[0]


def train(engine: Any, steps: int) -> list[float]:
    return [engine.train_batch().loss for _ in range(steps)]


def whole(engine: Any) -> dict[str, Tensor]:
    """Everything that a checkpoint should bring back, gathered on every rank."""
    found = {name: value.clone() for name, value in engine.module.named_buffers()}
    keys = sorted({key for state in engine.basic_optimizer.state.values() for key in state})
    for owner in engine.owners:
        parameter = owner.store.contents.held[owner.name]
        found[owner.name] = full_value(parameter)
        for key in keys if owner.name in owner.store.contents.trained else ():
            value = full_state(parameter, key)
            if value is not None:
                found[f"{owner.name}/{key}"] = value
    return {name: value.detach().clone() for name, value in found.items()}


def train_and_save(case: Case, folder: str, steps: int = 3, more: int = 0, **options: Any) -> tuple[Any, list[float]]:
    """What an engine holds when it saves, and the losses of the steps that follow."""
    engine = build(case)
    train(engine, steps)
    held = whole(engine)
    engine.save_checkpoint(folder, client_state={"epoch": 3, "shape": (2, 3)}, **options)
    engine.finish_saving()
    return held, train(engine, more)


def load_and_train(case: Case, folder: str, more: int = 0, **options: Any) -> tuple[Any, ...]:
    """What another engine, built from another seed, holds after loading it, and its losses from there."""
    engine = build(case, seed=99)
    path, client = engine.load_checkpoint(folder, **options)
    held = whole(engine)
    facts = {
        "path": Path(path).name if path else None,
        "client": client,
        "steps": engine.global_steps,
        "samples": engine.global_samples,
        "lr": engine.get_lr(),
        "scale": engine.loss_scale(),
        "report": str(engine.load_report),
    }
    return held, facts, train(engine, more)


def differences(saved: dict[str, Tensor], loaded: dict[str, Tensor]) -> list[str]:
    """The names of what is not bitwise the same."""
    return [
        name
        for name in {**saved, **loaded}
        if name not in loaded or name not in saved or not torch.equal(saved[name], loaded[name])
    ]


def load_and_save(case: Case, folder: str, again: str, more: int = 0) -> list[float]:
    """Load a checkpoint and save it again at once, then train."""
    engine = build(case, seed=99)
    engine.load_checkpoint(folder)
    engine.save_checkpoint(again)
    assert str(engine.load_report) == ""
    return train(engine, more)


def save_and_train(case: Case, folder: str, more: int = 0) -> list[float]:
    engine = build(case)
    train(engine, 3)
    engine.save_checkpoint(folder)
    return train(engine, more)


def changed(one: str, other: str, tag: str = "global_step3") -> list[str]:
    """The tensors in which two checkpoints differ; random states belong to ranks and are left out."""
    with Reader(Path(one) / tag) as first, Reader(Path(other) / tag) as second:
        found = [each.what for each in compare(first, second)]
    return [what for what in found if " '" in what and not what.startswith("rng")]


def load_all(case: Case, saves: list[tuple[str, dict[str, Tensor]]]) -> list[tuple[str, list[str], dict[str, Any]]]:
    """Load several checkpoints into engines of one kind; for each what is not as it was saved, and the facts."""
    found = []
    for folder, saved in saves:
        held, facts, losses = load_and_train(case, folder, more=1)
        found.append((folder, differences(saved, held), facts | {"losses": losses}))
    return found


def warnings_of(call):
    """What a call returns, and what it warns of."""
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("mizzen")
    logger.addHandler(handler)
    try:
        return call(), records
    finally:
        logger.removeHandler(handler)
