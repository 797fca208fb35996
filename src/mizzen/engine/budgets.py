"""Byte budgets of `offload` that are "auto": numbers from what the machine has free, alike on all ranks.

A plan is a pure function, so they are found before it is made, and from there on they are like numbers that somebody
has written down: printed, compared among the ranks, and saved with the configuration.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed import ReduceOp

from mizzen.accelerator import get_accelerator
from mizzen.accelerator.host import capacity
from mizzen.checkpoint.choose import candidates
from mizzen.checkpoint.rank_group import attempt
from mizzen.checkpoint.read import read_manifest
from mizzen.comm import collectives, groups
from mizzen.config.layout import AXES
from mizzen.config.schema import Config
from mizzen.config.zero import OffloadConfig
from mizzen.environment import World
from mizzen.files import free_bytes
from mizzen.log import log_dist, warn_once
from mizzen.model.sketch import Sketch
from mizzen.offload.places import OffloadSettings
from mizzen.offload.tier import device_free
from mizzen.order import ORDER
from mizzen.plan.build import Plan, build
from mizzen.wording import byte_size

RESERVE: Final = 10
"""One part in so many of the host's memory, and of a drive, is left to others."""


@dataclass(frozen=True, slots=True)
class FreeBytes:
    """What is free for one rank, in the places of masters and states."""

    device: int
    host: int
    nvme: int

    @classmethod
    def here(cls, model: nn.Module, paths: tuple[str, ...], local_size: int) -> "FreeBytes":
        """Ask the machine, whose host memory and drives `local_size` ranks share."""
        accelerator, sharing = get_accelerator(), max(1, local_size)
        host, free = capacity(), device_free(accelerator)
        if accelerator.shares_host_memory:  # the host is the device of all of them
            free //= sharing
        there = accelerator.device().type
        held = sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type == there and not p.is_meta)
        drives = len(paths) * min(map(free_bytes, paths), default=0)
        return cls(
            device=free + held,  # the plan counts the model, too
            host=0 if accelerator.shares_host_memory else max(0, host.available - host.total // RESERVE) // sharing,
            nvme=(drives - drives // RESERVE) // sharing,
        )

    def least(self) -> "FreeBytes":
        """The least of each over all ranks, which all call this."""
        found = torch.tensor([self.device, self.host, self.nvme], device=groups.exchange_device())
        collectives.all_reduce(found, op=ReduceOp.MIN)
        return FreeBytes(*found.tolist())


def with_budgets(config: Config, sketch: Sketch, model: nn.Module, world: World) -> Config:
    """A configuration whose budgets are numbers; where any of them is "auto", every rank calls this."""
    asked = config.offload
    if asked is None or not open_budgets(asked):
        return config
    free = FreeBytes.here(model, OffloadSettings.of(config).paths, world.local_size)
    free = free if world.size == 1 else free.least()
    near = _plan_with(config, sketch, world, device_bytes=sys.maxsize, host_bytes=None, nvme_bytes=0)
    shards = near.cost.host  # parameters alone may be there
    plan = _plan_with(config, sketch, world, device_bytes=0, host_bytes=shards, nvme_bytes=sys.maxsize)
    kept = max(0, near.cost.gradients - plan.cost.gradients)
    copies = OffloadSettings.of(config).in_backward
    found = budgets_from(free, plan, is_fixed=config.deterministic, shards=shards, kept=kept, copies=copies)
    found = _recorded(config, plan, free, world, shards) or found
    budgets = asked.model_copy(update={key: found[key] for key in open_budgets(asked)})
    log_dist(f"offload: {budgets.budget_words()} for the training state of each rank, from what is free")
    return config.model_copy(update={"offload": budgets})


def _plan_with(config: Config, sketch: Sketch, world: World, **budgets: int | None) -> Plan:
    """The plan with these budgets."""
    asked = (config.offload or OffloadConfig()).model_copy(update=budgets)
    return build(config.model_copy(update={"offload": asked}), world.size, sketch, ORDER)


def open_budgets(asked: OffloadConfig) -> tuple[str, ...]:
    """The budgets that are to be found."""
    return tuple(key for key, value in asked.budgets.items() if value == "auto")


def budgets_from(
    free: FreeBytes, plan: Plan, *, is_fixed: bool, shards: int = 0, kept: int = 0, copies: bool = False
) -> dict[str, int]:
    """Budgets from what is free, and from a plan by which all masters and states rest on NVMe.

    Of what a device has left beside that plan one half is for activations, which no plan knows; gradients that stay
    where masters do are `kept` there. Parameters that rest in host memory, `shards`, are a part of its budget. A CPU
    and a GPU differ in the last bits of a step: with `is_fixed` nothing stays on the device, however much is free.
    With `copies` what rests in host memory is there twice.
    """
    needs = plan.cost
    return {
        "device_bytes": 0 if is_fixed else max(0, free.device - needs.total - kept) // 2,
        # gradients come to the host, wherever states rest
        "host_bytes": max(0, free.host - needs.host) // (1 + copies) + min(shards, max(0, free.host)),
        "nvme_bytes": free.nvme,
    }


def _recorded(config: Config, plan: Plan, free: FreeBytes, world: World, shards: int) -> dict[str, int] | None:
    """The budgets of the last checkpoint in `checkpoint.dir`, where it has the same layout and they still fit."""
    if config.checkpoint.dir is None or config.deterministic:
        return None
    said: list[Any] = [_facts(Path(config.checkpoint.dir)) if world.rank == 0 else None]
    if world.size > 1:
        collectives.broadcast_object_list(said, src=0)
    facts: Mapping[str, Any] = said[0] or {}
    before = _budgets_in(facts)
    if before is None or facts.get("layout") != dict(zip(AXES, plan.resolved.layout.shape, strict=True)):
        return None
    resting, needs = plan.cost.nvme, plan.cost
    room = replace(free, device=free.device - needs.total, host=free.host - needs.host + shards)
    beside = {"host": shards}
    short = [
        f"{field.name} {byte_size(size)}, where {byte_size(left)} is free"
        for field in fields(room)
        if (size := min(resting + beside.get(field.name, 0), before[f"{field.name}_bytes"]))
        > (left := max(0, getattr(room, field.name)))
    ]
    if short:
        warn_once(
            f"offload: the budgets of the run in {config.checkpoint.dir} do not fit now ({'; '.join(short)}): "
            "masters and states rest elsewhere, and the last bits of a step may be others"
        )
        return None
    return before


def _facts(root: Path) -> Mapping[str, Any] | None:
    """What the last checkpoint of a folder says; None where there is none that can be read."""

    def read() -> Mapping[str, Any] | None:
        tags = candidates(root, None, with_older=False)
        return read_manifest(root / tags[0]).facts if tags else None

    return attempt(read)[0]


def _budgets_in(facts: Mapping[str, Any]) -> dict[str, int] | None:
    """The budgets that a checkpoint was saved with, if all of them are numbers."""
    config = facts.get("config")
    section = config.get("offload") if isinstance(config, Mapping) else None
    keys = ("device_bytes", "host_bytes", "nvme_bytes")
    found = {key: section.get(key) for key in keys} if isinstance(section, Mapping) else {}
    numbers = {key: value for key, value in found.items() if isinstance(value, int)}
    return numbers if len(numbers) == len(keys) else None


def tell_other_budgets(config: Config, facts: Mapping[str, Any], folder: Path) -> None:
    """Say so where the run that goes on from a checkpoint keeps less or more on the device than the one before."""
    before, asked = _budgets_in(facts), config.offload
    if before is not None and asked is not None and asked.device_bytes != before["device_bytes"]:
        log_dist(
            f"{folder} was saved with offload.device_bytes {before['device_bytes']}, and this run has "
            f"{asked.device_bytes}: the last bits of its steps may be others. Set the key to that number, or name "
            "the folder as checkpoint.dir, which is looked at before budgets are measured"
        )
