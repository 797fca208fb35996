"""The other systems: torch.distributed.checkpoint, which is always there, and DeepSpeed, where it is installed."""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from faults.peers import Peer
from faults.saves import tensors_of


class Dcp:
    """One file for each tensor, as many ranks would write."""

    title = "torch.distributed.checkpoint"
    data = "*.distcp"
    pickled = ".metadata"

    def prepare(self) -> None:
        """Nothing has to be built."""

    def save(self, folder: Path, number: int) -> None:
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
        dcp.save(tensors_of(number), storage_writer=writer, no_dist=True)

    def load(self, folder: Path) -> dict[str, torch.Tensor]:
        found = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(0).items()}
        dcp.load(found, checkpoint_id=folder, no_dist=True)
        return found


class DeepSpeed:
    """An engine at stage 2 on one rank: the weights are its parameters, the moments those of its optimizer."""

    title = "DeepSpeed"
    data = "step/*.pt"
    pickled = "step/*.pt"

    def prepare(self) -> None:
        import deepspeed

        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.engine, *_ = deepspeed.initialize(
            model=Holder(),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "Adam", "params": {"lr": 0.0, "torch_adam": True}},
                "zero_optimization": {"stage": 2},
            },
        )
        self.engine.backward(self.engine())
        self.engine.step()

    def save(self, folder: Path, number: int) -> None:
        self._flat("exp_avg", [tensor for name, tensor in tensors_of(number).items() if name.startswith("moment")])
        self._flat(None, [tensor for name, tensor in tensors_of(number).items() if name.startswith("weight")])
        self.engine.save_checkpoint(str(folder), tag="step")

    def load(self, folder: Path) -> dict[str, torch.Tensor]:
        zeros = list(tensors_of(0).values())
        self._flat("exp_avg", [torch.zeros_like(zeros[0])] * 4)
        self._flat(None, [torch.zeros_like(zeros[0])] * 4)
        path, _ = self.engine.load_checkpoint(str(folder), tag="step")
        if path is None:
            raise FileNotFoundError(folder)
        optimizer = self.engine.optimizer
        master = optimizer.single_partition_of_fp32_groups[0]
        kinds = {"weight": master, "moment": optimizer.optimizer.state[master]["exp_avg"]}
        names = tensors_of(0)
        size = next(iter(names.values())).numel()
        return {
            name: kinds[kind][int(at) * size : (int(at) + 1) * size].detach().view_as(tensor).clone()
            for name, tensor in names.items()
            for kind, _, at in [name.partition(".")]
        }

    def _flat(self, state: str | None, tensors: list[torch.Tensor]) -> None:
        """Write over the engine's own numbers: its master weights and the parameters, or one of the moments."""
        optimizer, flat = self.engine.optimizer, torch.cat([tensor.reshape(-1) for tensor in tensors])
        master = optimizer.single_partition_of_fp32_groups[0]
        with torch.no_grad():
            target = master if state is None else optimizer.optimizer.state[master][state]
            target[: flat.numel()].copy_(flat)
            if state is None:
                for parameter, tensor in zip(self.engine.module.parameters(), tensors, strict=True):
                    parameter.copy_(tensor)


class Holder(nn.Module):
    """The parameters of a save."""

    def __init__(self) -> None:
        super().__init__()
        weights = [tensor for name, tensor in tensors_of(0).items() if name.startswith("weight")]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros_like(tensor)) for tensor in weights)

    def forward(self) -> torch.Tensor:
        return sum(weight.sum() for weight in self.weights)


def installed() -> list[Peer]:
    """What the table can show beside ours."""
    found: list[Peer] = [Dcp()]
    if find_spec("deepspeed") is not None:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
        import_module("deepspeed")  # once, before the processes that need it are forked
        found.append(DeepSpeed())
    return found
