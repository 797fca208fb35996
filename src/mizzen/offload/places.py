"""Which lots rest where: a pure function of byte budgets. No tensor and no machine is asked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from mizzen.config.execution import AioConfig
from mizzen.config.layout import Layout
from mizzen.config.optimizer import NOT_ELEMENTWISE, rule_of
from mizzen.config.schema import Config
from mizzen.config.zero import ZenFlowConfig
from mizzen.errors import PlanError
from mizzen.wording import byte_size

DEVICE: Final = "device"
PLACES: Final = (DEVICE, "host", "nvme")
"""From the nearest to the farthest."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that may rest in each place, on one rank; None is without a limit."""

    device: int | None = None
    host: int | None = None
    nvme: int | None = 0
    shards: int = 0
    """Bytes in host memory that parameters take, with the buffers of those in files; others get the rest."""

    def limits(self) -> tuple[int | None, ...]:
        """For masters and states, in the order of `PLACES`."""
        return self.device, None if self.host is None else self.host - self.shards, self.nvme

    def less(self, sizes: Sequence[int], places: Sequence[str]) -> "Budget":
        """What is left after lots of these bytes that rest in these places."""
        taken = {place: sum(size for size, at in zip(sizes, places, strict=True) if at == place) for place in PLACES}
        pairs = zip((self.device, self.host, self.nvme), PLACES, strict=True)
        device, host, nvme = (None if limit is None else limit - taken[place] for limit, place in pairs)
        return Budget(device, host, nvme, self.shards)

    def __str__(self) -> str:
        limits = zip(PLACES, (self.device, self.host, self.nvme), strict=True)
        words = (f"{place} {'no limit' if limit is None else byte_size(limit)}" for place, limit in limits)
        beside = f"; parameters take {byte_size(self.shards)} of host" if self.shards else ""
        return f"{', '.join(words)}{beside}"


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """What a configuration says of states that rest outside the device."""

    budget: Budget | None = None
    """Absent where the sections of `zero_optimization` say it."""
    place: str = DEVICE
    """Where those sections want masters and states."""
    ratio: float = 1.0
    """The share of them that rests there."""
    pin: bool = True
    paths: tuple[str, ...] = ()
    """Folders on NVMe drives, over which files are striped."""
    aio: AioConfig = AioConfig()
    states: int = 0
    """Full-size tensors that the optimizer keeps for each parameter, where somebody knows that."""
    zenflow: ZenFlowConfig | None = None
    """How what rests in host memory is stepped, if not all of it in every step."""
    in_backward: bool = False
    """Whether the host steps during backward, into copies."""

    @classmethod
    def of(cls, config: Config) -> "OffloadSettings":
        """Read a configuration."""
        asked, section = config.offload, config.zero_optimization.offload_optimizer
        given = (section.nvme_path if section is not None else None) or ()
        paths = (given,) if isinstance(given, str) else tuple(given)
        budget = None
        if asked is not None and asked.has_budgets:  # one that is yet to be found is the least, then without a limit
            device, host, nvme = asked.device_bytes, asked.host_bytes, asked.nvme_bytes
            budget = Budget(
                0 if device == "auto" else device,
                None if host == "auto" else host,
                (None if paths else 0) if nvme == "auto" else nvme,
            )
        in_backward = asked is not None and asked.step_in_backward
        if section is None:
            return cls(budget, in_backward=in_backward)
        place = {"cpu": "host", "nvme": "nvme"}.get(section.device, DEVICE)
        return cls(
            *(budget, place, section.ratio, section.pin_memory, paths, config.aio or AioConfig()),
            zenflow=config.zero_optimization.zenflow,
            in_backward=in_backward or section.super_offload,
        )

    @property
    def is_on(self) -> bool:
        """Whether anything may rest outside the device."""
        return self.place != DEVICE or self.budget is not None

    def beside(self, shards: int) -> "OffloadSettings":
        """These settings where parameters, with their buffers, take so many bytes of host memory."""
        if self.budget is None:
            return self
        if self.budget.host is not None and shards > self.budget.host:
            raise PlanError(
                f"parameters of {byte_size(shards)} on a rank rest in host memory (zero_optimization.offload_param), "
                f"and offload.host_bytes is {byte_size(self.budget.host)}: raise it, add ranks, or let parameters rest "
                "on NVMe (device nvme, with a smaller max_in_cpu)"
            )
        return replace(self, budget=replace(self.budget, shards=shards))

    def after(self, sizes: Sequence[int], places: Sequence[str]) -> "OffloadSettings":
        """These settings for what comes beside lots of these bytes that rest in these places."""
        return self if self.budget is None else replace(self, budget=self.budget.less(sizes, places))

    def budget_for(self, total: int) -> Budget:
        """The bytes that each place may hold of so many; `offload_optimizer` says what no budget says of the device."""
        kept = None if self.place == DEVICE else total - round(total * self.ratio)
        if self.budget is not None:
            return self.budget if self.budget.device is not None else replace(self.budget, device=kept)
        if kept is None:
            return Budget()
        return Budget(kept, None if self.place == "host" else 0, None if self.place == "nvme" else 0)


def places_for(sizes: Sequence[int], settings: OffloadSettings) -> tuple[str, ...]:
    """A place for each lot of these bytes, in the order in which backward completes them.

    The last to be completed are the nearest: nothing of the step would be left to hide a copy behind.
    """
    budget = settings.budget_for(sum(sizes))
    left = list(budget.limits())
    found: list[str] = []
    nearest = 0
    for size in reversed(sizes):
        at = next((at for at in range(nearest, 3) if left[at] is None or size <= (left[at] or 0)), None)
        if at is None:
            raise PlanError(
                f"masters and optimizer states of {byte_size(sum(sizes))} on a rank do not fit their places "
                f"({budget}): raise a limit of `offload`, add ranks, or keep fewer states"
            )
        nearest = at
        limit = left[at]
        left[at] = None if limit is None else limit - size
        found.append(PLACES[at])
    return tuple(reversed(found))


def refuse_in_backward(config: Config) -> None:
    """Refuse a step during backward where it cannot be had."""
    settings, asked = OffloadSettings.of(config), config.offload
    if not settings.in_backward:
        return
    low = config.bf16.bf16_master_weights_and_grads or config.fp16.fp16_master_weights_and_grads
    rule = config.optimizer.type if config.optimizer is not None else "Adam"
    reasons = {
        "the host has nothing to step: it needs offload_optimizer with device cpu, or offload.device_bytes": (
            not settings.is_on
        ),
        "what rests on NVMe is stepped after the vote: use device cpu, without offload.nvme_bytes": (
            settings.place == "nvme" or (asked is not None and asked.nvme_bytes != 0)
        ),
        "zenflow has a step of its own beside the next backward: leave one of the two out": settings.zenflow
        is not None,
        "masters are in fp32: leave bf16_master_weights_and_grads or fp16_master_weights_and_grads out": low,
        f"the rule has to work element by element, and {rule} does not": rule_of(rule) in NOT_ELEMENTWISE,
        "all of it is stepped on the device: use an offload.streamed_ratio below 1": (
            asked is not None and asked.streamed_ratio != "auto" and asked.streamed_ratio >= 1
        ),
    }
    if found := [reason for reason, is_so in reasons.items() if is_so]:
        raise PlanError(f"offload.step_in_backward (offload_optimizer.super_offload): {'; '.join(found)}")


def refuse_zenflow(config: Config, layout: Layout) -> None:
    """Refuse ZenFlow where it cannot be had, or where what is said of it does not fit together."""
    zero, asked = config.zero_optimization, config.offload
    section, optimizer = zero.zenflow, zero.offload_optimizer
    if section is None:
        return
    low = config.bf16.bf16_master_weights_and_grads or config.fp16.fp16_master_weights_and_grads
    axes = {"pipeline stages": layout.pp, "tensor-parallel ranks": layout.tp, "copies": layout.dp_replicate}
    rule = config.optimizer.type if config.optimizer is not None else "Adam"
    select, update = section.select_interval, section.update_interval
    by_steps = section.select_strategy == "step"
    reasons = {
        "it needs offload_optimizer with device cpu": optimizer is None or optimizer.device != "cpu",
        "it needs Adam or AdamW, not " + rule: rule_of(rule) not in ("adam", "adamw"),
        "parameters stay on the device: leave offload_param out": zero.offload_param is not None,
        "masters are in fp32: leave bf16_master_weights_and_grads or fp16_master_weights_and_grads out": low,
        "nothing rests on NVMe: leave offload.nvme_bytes out": asked is not None and asked.nvme_bytes != 0,
        "nothing passes through the device: leave offload.streamed_ratio out": (
            asked is not None and asked.streamed_ratio not in ("auto", 0)
        ),
        **{f"it does not work with several {name} yet, and there are {size}": size > 1 for name, size in axes.items()},
        'select_strategy "step" needs a number as select_interval': by_steps and select == "auto",
        f'select_interval {select} counts nothing with select_strategy "auto": say "step" or "epoch"': (
            section.select_strategy == "auto" and select != "auto"
        ),
        f"select_interval {select} is below update_interval {update}: columns change only when no gradient waits": (
            by_steps and isinstance(select, int) and isinstance(update, int) and select < update
        ),
    }
    if found := [reason for reason, is_so in reasons.items() if is_so]:
        raise PlanError(f"zero_optimization.zenflow: {'; '.join(found)}")


@dataclass(frozen=True, slots=True)
class ParameterSettings:
    """What a configuration says of parameters that rest outside the device."""

    place: str = DEVICE
    in_host: int = 0
    """Elements that stay in host memory where the others are on NVMe."""
    buffers: int = 0
    """Buffers of host memory through which those pass that are on NVMe."""
    pin: bool = True
    paths: tuple[str, ...] = ()
    aio: AioConfig = AioConfig()

    @classmethod
    def of(cls, config: Config) -> "ParameterSettings":
        """Read a configuration."""
        section = config.zero_optimization.offload_param
        if section is None:
            return cls()
        place = {"cpu": "host", "nvme": "nvme"}.get(section.device, DEVICE)
        given = section.nvme_path or ()
        paths = (given,) if isinstance(given, str) else tuple(given)
        aio = config.aio or AioConfig()
        return cls(place, section.max_in_cpu, section.buffer_count, section.pin_memory, paths, aio)

    @property
    def is_on(self) -> bool:
        """Whether parameters rest outside the device."""
        return self.place != DEVICE


def parameter_places(counts: Sequence[int], settings: ParameterSettings) -> tuple[str, ...]:
    """A place for the shards of each unit of so many elements, in the order of the model.

    With NVMe the first ones stay in host memory, as many as may: nothing of a forward is there to read them behind.
    """
    left = settings.in_host
    found: list[str] = []
    for count in counts:
        is_far = settings.place == "nvme" and (count > left or "nvme" in found)
        left -= count
        found.append("nvme" if is_far else "host" if settings.is_on else DEVICE)
    return tuple(found)
