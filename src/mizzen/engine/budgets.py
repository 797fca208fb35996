"""Byte budgets of `offload` that are "auto": numbers from what the machine has free, alike on all ranks.

A plan is a pure function, so they are found before it is made, and from there on they are like numbers that somebody
has written down: printed, compared among the ranks, and saved with the configuration.
"""

import os
import sys
from collections import Counter
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
from mizzen.config.layout import AXES, Layout
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
"""One part in so many of the host's memory, of a drive, and at worst of the device, is left to others."""
LOT_SHARE: Final = 20
"""One part in so many of masters and states may be lost where two places meet: a lot rests in one of them."""


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
        drives = _free_on(paths)
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


def _free_on(paths: tuple[str, ...]) -> int:
    """Free bytes for files that are striped over some folders; those on one disk share what it has."""
    disks = Counter(os.stat(path).st_dev for path in paths)
    return len(paths) * min((free_bytes(path) // disks[os.stat(path).st_dev] for path in paths), default=0)


def with_budgets(config: Config, sketch: Sketch, model: nn.Module, world: World) -> Config:
    """A configuration whose budgets are numbers; where any of them is "auto", every rank calls this."""
    asked = config.offload
    if asked is None or not open_budgets(asked):
        return config
    free = FreeBytes.here(model, OffloadSettings.of(config).paths, world.local_size)
    free = free if world.size == 1 else free.least()
    needs = measured(config, sketch, world)
    found = _recorded(config, needs, free, world) or budgets_from(free, needs, asked, is_fixed=config.deterministic)
    budgets = asked.model_copy(update={key: found[key] for key in open_budgets(asked)})
    log_dist(f"offload: {budgets.budget_words()} for the training state of each rank, from what is free")
    return config.model_copy(update={"offload": budgets})


@dataclass(frozen=True, slots=True)
class Needs:
    """What training takes on a rank, beside masters and states wherever these rest."""

    layout: Layout
    device: int
    host: int
    """Parameters that rest in host memory; with files also what passes through on its way there."""
    shards: int
    """Of it those parameters, which are a part of the budget of the host."""
    resting: int
    """Masters and states."""
    kept: int = 0
    """Gradients that stay on the device where all masters do."""
    beside: int = 0
    """Host memory beside masters and states, where all of them rest there: gradients, and copies of a step ahead."""
    has_files: bool = False
    """Whether masters may rest in files, with their gradients in host memory."""

    def device_room(self, free: int) -> int:
        """Bytes of the device for masters and states, each with its gradient, where so many are free."""
        left = max(0, free - self.device)
        return left * self.resting // (self.resting + self.kept) if self.kept else left

    def host_room(self, free: int, on_device: int) -> int:
        """Bytes of host memory for masters and states, each with what it has beside it, where so many are free.

        With files it also has the gradients of masters that rest there: of all that do not rest on the device.
        """
        left = max(0, free - self.host)
        if self.has_files:
            return max(0, left - self.beside * max(0, self.resting - on_device) // self.resting)
        beside = left * self.beside // (self.resting + self.beside) if self.beside else 0
        return left - min(beside, self.beside)


def measured(config: Config, sketch: Sketch, world: World) -> Needs:
    """What a configuration needs, from plans by which masters and states rest in one place, and then in another."""

    def cost(config: Config, device: int, host: int | None, nvme: int) -> Plan:
        budgets = {"device_bytes": device, "host_bytes": host, "nvme_bytes": nvme}
        asked = (config.offload or OffloadConfig()).model_copy(update=budgets)
        return build(config.model_copy(update={"offload": asked}), world.size, sketch, ORDER)

    plain = _stepped_at_once(config)
    near = cost(plain, sys.maxsize, None, 0).cost
    plan = cost(plain, 0, near.host, sys.maxsize)  # parameters alone are in host memory
    far = plan.cost
    has_files = bool(OffloadSettings.of(config).paths)
    beside = cost(config, 0, None, 0).cost.host - near.host - far.nvme
    return Needs(
        layout=plan.resolved.layout,
        device=far.total,
        host=far.host - beside if has_files else near.host,
        shards=near.host,
        resting=far.nvme,
        kept=max(0, near.gradients - far.gradients),
        beside=beside,
        has_files=has_files,
    )


def _stepped_at_once(config: Config) -> Config:
    """A configuration without what steps some of the states at other times, and takes host memory for it."""
    settings, zero, asked = OffloadSettings.of(config), config.zero_optimization, config.offload
    if settings.zenflow is None and not settings.in_backward:
        return config
    section = zero.offload_optimizer
    section = section.model_copy(update={"super_offload": False}) if section is not None else None
    zero = zero.model_copy(update={"zenflow": None, "offload_optimizer": section})
    asked = asked.model_copy(update={"step_in_backward": False}) if asked is not None else None
    return config.model_copy(update={"zero_optimization": zero, "offload": asked})


def open_budgets(asked: OffloadConfig) -> tuple[str, ...]:
    """The budgets that are to be found."""
    return tuple(key for key, value in asked.budgets.items() if value == "auto")


def budgets_from(free: FreeBytes, needs: Needs, asked: OffloadConfig, *, is_fixed: bool) -> dict[str, int]:
    """Budgets from what is free, and from what training needs beside masters and states.

    Of what a device has left beside that one half is for activations, which no plan knows; less where masters and
    states have no room elsewhere. A CPU and a GPU differ in the last bits of a step: with `is_fixed` nothing stays on
    the device, however much is free.
    """
    room = needs.device_room(free.device)
    least, most = room // 2, room - room // RESERVE
    if is_fixed or asked.device_bytes != "auto":
        least = most = asked.device_bytes if isinstance(asked.device_bytes, int) else 0

    def host(on_device: int) -> int:
        return needs.host_room(free.host, on_device) + min(needs.shards, max(0, free.host))

    far = (
        value if isinstance(value, int) else found
        for value, found in ((asked.host_bytes, host(least)), (asked.nvme_bytes, free.nvme))
    )
    homeless = needs.resting + needs.shards - sum(far)
    if homeless > 0:
        homeless += needs.resting // LOT_SHARE
    device = max(least, min(most, homeless))
    return {"device_bytes": device, "host_bytes": host(device), "nvme_bytes": free.nvme}


def _recorded(config: Config, needs: Needs, free: FreeBytes, world: World) -> dict[str, int] | None:
    """The budgets of the last checkpoint in `checkpoint.dir`, where it has the same layout and they still fit."""
    if config.checkpoint.dir is None or config.deterministic:
        return None
    said: list[Any] = [_facts(Path(config.checkpoint.dir)) if world.rank == 0 else None]
    if world.size > 1:
        collectives.broadcast_object_list(said, src=0)
    facts: Mapping[str, Any] = said[0] or {}
    before = _budgets_in(facts)
    if before is None or facts.get("layout") != dict(zip(AXES, needs.layout.shape, strict=True)):
        return None
    host = needs.host_room(free.host, before["device_bytes"]) + needs.shards
    room = replace(free, device=needs.device_room(free.device), host=host)
    beside = {"host": needs.shards}
    short = [
        f"{field.name} {byte_size(size)}, where {byte_size(left)} is free"
        for field in fields(room)
        if (size := min(needs.resting + beside.get(field.name, 0), before[f"{field.name}_bytes"]))
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
