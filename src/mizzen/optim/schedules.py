"""Learning-rate schedules. Each is a pure function of the step; the object around it writes its values into groups.

A schedule is made before the first step, at step -1, and sets the rates with which that step is taken. After the i-th
applied step, counted from 0, it is at step i. `Stepper` is how an engine steps one. The command-line flags at the end
are for scripts that choose a schedule there; nothing in the library reads them.
"""

import math
from abc import ABC, abstractmethod
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import signature
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from mizzen.config.section import flag, real, shown, whole
from mizzen.errors import CheckpointError, ConfigError, UsageError
from mizzen.log import warn_once

PerGroup = float | Sequence[float]
"""One value for all parameter groups, or one for each."""


@dataclass(eq=False)
class LRSchedule(ABC):
    """What all schedules share; each has its arguments as fields, and `lr_at`."""

    optimizer: Optimizer = field(repr=False)
    """Whose groups are written to."""
    last_batch_iteration: int = field(default=-1, kw_only=True)
    """The step at which the schedule is."""

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, Optimizer):
            raise UsageError(f"a schedule needs a torch optimizer; this is {type(self.optimizer).__name__}")
        for one in fields(self):
            convert, value = _CONVERT.get(one.type), getattr(self, one.name)
            if convert is None or (value is None and one.default is None):
                continue
            try:
                setattr(self, one.name, convert(value))
            except ValueError as error:
                raise _refusal(one.name, str(error)) from None
        self.check()
        self._base_rates = [float(group.get("initial_lr", group["lr"])) for group in self.optimizer.param_groups]
        self._write(self.last_batch_iteration)

    @abstractmethod
    def check(self) -> None:
        """Raise a `ConfigError` for arguments that do not fit."""

    @abstractmethod
    def lr_at(self, step: int) -> list[float]:
        """The learning rate of every group at a step."""

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next step, or to the given one."""
        step = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self._write(step)
        self.last_batch_iteration = step

    def get_lr(self) -> list[float]:
        """The learning rate of every group now."""
        return self.lr_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """The learning rate of every group now, under the name that torch gives it."""
        return self.get_lr()

    def state_dict(self) -> dict[str, int]:
        """The step; all else follows from the arguments."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved step."""
        try:
            step = whole(state.get("last_batch_iteration"))
        except ValueError as error:
            raise CheckpointError(f"the schedule's state holds no step: last_batch_iteration: {error}") from None
        self.step(step)

    def _write(self, step: int) -> None:
        rates = self.lr_at(step)
        if len(rates) != len(self.optimizer.param_groups):
            raise UsageError(
                f"the optimizer has {len(self.optimizer.param_groups)} parameter groups and had {len(rates)} when its "
                "schedule was made: add groups first"
            )
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _per_group(self, name: str) -> list[float]:
        """An argument as one value for each group."""
        value, count = getattr(self, name), len(self._base_rates)
        if isinstance(value, float):
            return [value] * count
        if len(value) != count:
            raise _refusal(name, f"{len(value)} values for {count} parameter groups: give one value, or one for each")
        return list(value)


@dataclass(eq=False)
class LRRangeTest(LRSchedule):
    """Raise the rate steadily, to see how far it can go: min * (1 + rate * intervals)."""

    lr_range_test_min_lr: PerGroup = 1e-3
    """The rate to start from."""
    lr_range_test_step_size: int = 2000
    """Steps of one interval."""
    lr_range_test_step_rate: float = 1.0
    """How much one interval adds, as a multiple of the start."""
    lr_range_test_staircase: bool = False
    """Raise the rate once per interval instead of at every step."""

    def check(self) -> None:
        """An interval has steps."""
        _at_least(self, 1, "lr_range_test_step_size")

    def lr_at(self, step: int) -> list[float]:
        """Grows without a limit."""
        intervals = (step + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        growth = 1 + self.lr_range_test_step_rate * intervals
        return [low * growth for low in self._per_group("lr_range_test_min_lr")]


@dataclass(eq=False)
class OneCycle(LRSchedule):
    """Up from `cycle_min_lr` to `cycle_max_lr` and down again, then decay. The first beta goes the other way round.

    While momentum is cycled the second beta is 0.99. An optimizer without betas keeps its momentum.
    """

    cycle_min_lr: PerGroup
    """The rate at both ends of the cycle."""
    cycle_max_lr: PerGroup
    """The rate at its top."""
    decay_lr_rate: float = 0.0
    """After the cycle the rate is divided by 1 + this * intervals."""
    cycle_first_step_size: int = 2000
    """Steps of the way up."""
    cycle_second_step_size: int | None = None
    """Steps of the way down; absent or -1 means as many."""
    cycle_first_stair_count: int = 0
    """Go up in so many stairs; 0 or -1 goes smoothly."""
    cycle_second_stair_count: int | None = None
    """Go down in so many stairs; absent means as many, 0 or -1 goes smoothly."""
    decay_step_size: int = 0
    """Steps of one interval of decay; 0 does not decay."""
    cycle_momentum: bool = True
    """Cycle the first beta."""
    cycle_min_mom: PerGroup = 0.8
    """The first beta at the top of the cycle, and for the very first step."""
    cycle_max_mom: PerGroup = 0.9
    """The first beta at both ends."""
    decay_mom_rate: float = 0.0
    """After the cycle the first beta is multiplied with 1 + this * intervals."""

    def check(self) -> None:
        """The way up has steps; momentum needs betas."""
        _at_least(self, 1, "cycle_first_step_size")
        _at_least(self, 0, "decay_step_size")
        _at_least(self, -1, "cycle_second_step_size", "cycle_first_stair_count", "cycle_second_stair_count")
        if self.cycle_momentum and any("betas" not in group for group in self.optimizer.param_groups):
            warn_once(f"OneCycle: {type(self.optimizer).__name__} has no betas, so its momentum is not cycled")
            self.cycle_momentum = False

    def lr_at(self, step: int) -> list[float]:
        """Between the two rates in the cycle, below the lower one after it."""
        height, decay = self._height(step), 1 + self.decay_lr_rate * self._intervals(step)
        lows, highs = self._per_group("cycle_min_lr"), self._per_group("cycle_max_lr")
        return [(low + (high - low) * height) / decay for low, high in zip(lows, highs, strict=True)]

    def momentum_at(self, step: int) -> list[float]:
        """The first beta of every group."""
        return self._per_group("cycle_min_mom") if step < 0 else self.cycled_momentum(step)

    def cycled_momentum(self, step: int) -> list[float]:
        """The first beta of every group by the cycle alone; never 1, at which moments would not forget."""
        height, growth = self._height(step), 1 + self.decay_mom_rate * self._intervals(step)
        pairs = zip(self._per_group("cycle_min_mom"), self._per_group("cycle_max_mom"), strict=True)
        return [min((high - (high - low) * height) * growth, max(high, 0.999)) for low, high in pairs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of every group now; None when they are not cycled."""
        return [group["betas"] for group in self.optimizer.param_groups] if self.cycle_momentum else None

    def _write(self, step: int) -> None:
        super()._write(step)
        if self.cycle_momentum:
            for group, momentum in zip(self.optimizer.param_groups, self.momentum_at(step), strict=True):
                group["betas"] = (momentum, 0.99)

    @property
    def _second(self) -> int:
        second = self.cycle_second_step_size
        return self.cycle_first_step_size if second is None or second < 0 else second

    def _height(self, step: int) -> float:
        """0 at the ends of the cycle, 1 at its top."""
        done, first, second = step + 1, self.cycle_first_step_size, self._second
        climbed, size, stairs = done, first, self.cycle_first_stair_count
        if done > first:
            climbed, size = max(0, first + second - done), second
            stairs = stairs if self.cycle_second_stair_count is None else self.cycle_second_stair_count
        if not climbed:
            return 0.0
        return climbed * stairs // size / stairs if stairs > 0 else climbed / size

    def _intervals(self, step: int) -> float:
        past = step + 1 - self.cycle_first_step_size - self._second
        return past / self.decay_step_size if past > 0 and self.decay_step_size else 0.0


@dataclass(eq=False)
class WarmupLR(LRSchedule):
    """Warm up from `warmup_min_lr` to `warmup_max_lr`, and stay there."""

    warmup_min_lr: PerGroup = 0.0
    """The rate to start from."""
    warmup_max_lr: PerGroup | None = None
    """The rate to reach; absent means the optimizer's own."""
    warmup_num_steps: int = 1000
    """Steps of the warm-up; 0 starts at the top."""
    warmup_type: str = "log"
    """How it grows: log or linear."""

    def check(self) -> None:
        """A known way to grow."""
        _check_warmup(self)

    def lr_at(self, step: int) -> list[float]:
        """Between the two rates."""
        height = _warmed(step, self.warmup_num_steps, self.warmup_type)
        highs = self._base_rates if self.warmup_max_lr is None else self._per_group("warmup_max_lr")
        return _between(self._per_group("warmup_min_lr"), highs, height)


@dataclass(eq=False)
class WarmupDecayLR(LRSchedule):
    """Warm up from `warmup_min_lr` to `warmup_max_lr`, then go back in a straight line until `total_num_steps`."""

    total_num_steps: int
    """Steps of the whole run."""
    warmup_min_lr: PerGroup = 0.0
    """The rate at both ends."""
    warmup_max_lr: PerGroup = 1e-3
    """The rate after the warm-up."""
    warmup_num_steps: int = 1000
    """Steps of the warm-up; 0 starts at the top."""
    warmup_type: str = "log"
    """How it grows: log or linear."""

    def check(self) -> None:
        """A known way to grow, and room for it."""
        _check_warmup(self)
        _check_total(self, self.total_num_steps, self.warmup_num_steps)

    def lr_at(self, step: int) -> list[float]:
        """Between the two rates."""
        warm = _steps_of_warmup(self.warmup_num_steps)
        height = _warmed(step, self.warmup_num_steps, self.warmup_type)
        if step >= warm:
            height = max(0.0, (self.total_num_steps - step) / max(1, self.total_num_steps - warm))
        return _between(self._per_group("warmup_min_lr"), self._per_group("warmup_max_lr"), height)


@dataclass(eq=False)
class WarmupCosineLR(LRSchedule):
    """Warm up to the optimizer's own rates, then follow half a cosine down to `cos_min_ratio` of them."""

    total_num_steps: int
    """Steps of the whole run."""
    warmup_min_ratio: float = 0.0
    """The part of each rate from which the warm-up starts; the very first step, with a warm-up, is taken with 0."""
    warmup_num_steps: int = 1000
    """Steps of the warm-up; 0 starts at the top."""
    cos_min_ratio: float = 1e-4
    """The part of each rate at the end and after it."""
    warmup_type: str = "log"
    """How it grows: log or linear."""

    def check(self) -> None:
        """A known way to grow, and room for it."""
        _check_warmup(self)
        _check_total(self, self.total_num_steps, self.warmup_num_steps)

    def lr_at(self, step: int) -> list[float]:
        """A part of each group's own rate."""
        return [base * self._ratio(step) for base in self._base_rates]

    def _ratio(self, step: int) -> float:
        warm = _steps_of_warmup(self.warmup_num_steps)
        if step < 0 and warm:
            return 0.0
        if step < warm:
            height = _warmed(step, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * height
        done = min(1.0, (step - warm + 1) / max(1, self.total_num_steps - warm))
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2


SCHEDULES: Final[tuple[type[LRSchedule], ...]] = (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
VALID_LR_SCHEDULES: Final = tuple(kind.__name__ for kind in SCHEDULES)


def _steps_of_warmup(steps: int) -> int:
    """A warm-up has at least 2 steps: the logarithm of one has no slope. 0 is none at all."""
    return max(2, steps) if steps else 0


def _warmed(step: int, steps: int, kind: str) -> float:
    """How warm a step is, from 0 to 1."""
    steps = _steps_of_warmup(steps)
    if step >= steps or not steps:
        return 1.0
    if step <= 0:
        return 0.0
    return step / steps if kind == "linear" else math.log(step + 1) / math.log(steps)


def _between(lows: Sequence[float], highs: Sequence[float], height: float) -> list[float]:
    return [low + (high - low) * height for low, high in zip(lows, highs, strict=True)]


def _check_warmup(schedule: WarmupLR | WarmupDecayLR | WarmupCosineLR) -> None:
    _at_least(schedule, 0, "warmup_num_steps")
    if schedule.warmup_type not in ("log", "linear"):
        raise _refusal("warmup_type", f'{shown(schedule.warmup_type)} is not one of ["log", "linear"]')


def _check_total(schedule: LRSchedule, total: int, warmup: int) -> None:
    _at_least(schedule, 1, "total_num_steps")
    if total < warmup:
        warn_once(
            f"{type(schedule).__name__}: total_num_steps is {total}, less than warmup_num_steps = {warmup}: the rate "
            "falls to its least value when the warm-up ends"
        )


def _at_least(schedule: LRSchedule, least: int, *names: str) -> None:
    for name in names:
        value = getattr(schedule, name)
        if value is not None and value < least:
            raise _refusal(name, f"{value} is below the least allowed value, {least}")


def _per_group_values(value: Any) -> float | tuple[float, ...]:
    return tuple(real(one) for one in value) if isinstance(value, list | tuple) else real(value)


def _refusal(name: str, message: str) -> ConfigError:
    return ConfigError(f"scheduler.params.{name}", message)


_CONVERT: Final[Mapping[Any, Callable[[Any], Any]]] = {
    int: whole,
    int | None: whole,
    float: real,
    bool: flag,
    PerGroup: _per_group_values,
    PerGroup | None: _per_group_values,
}
"""The type of an argument -> what makes a value of it out of JSON, or raises a ValueError."""


class Stepper:
    """Steps a schedule once per applied step, and refuses to go on when its position has moved in between.

    It looks at the position only, so it works for any schedule and also when the user holds the very object. Who sets
    `engine.lr_scheduler = None` takes the schedule over.
    """

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._position: Any = None

    def check(self, scheduler: Any, arguments: Mapping[str, Any]) -> None:
        """Refuse a step that the schedule could not follow, before anything has changed."""
        if scheduler is None:
            return
        found = _position(scheduler)
        if scheduler is self._scheduler and found != self._position:
            raise UsageError(
                f"the learning-rate schedule {type(scheduler).__name__} was left at {self._position} and is now at "
                f"{found}: the engine steps it after every applied step, so remove the other scheduler.step(), or set "
                "engine.lr_scheduler = None and step it yourself"
            )
        if scheduler is self._scheduler and not arguments:
            return
        try:
            signature(scheduler.step).bind(**arguments)
        except TypeError as error:
            raise UsageError(
                f"{type(scheduler).__name__}.step(): {error}; the arguments of a schedule's own step are given as "
                "engine.step(lr_kwargs={...})"
            ) from None

    def advance(self, scheduler: Any, arguments: Mapping[str, Any]) -> None:
        """One step. `arguments` are those of the schedule's own `step`."""
        if scheduler is None:
            return
        try:
            scheduler.step(**arguments)
        except Exception as error:  # noqa: BLE001  it may be anybody's schedule
            raise UsageError(
                f"the learning-rate schedule {type(scheduler).__name__} cannot go on: {type(error).__name__}: {error}"
            ) from error
        self._scheduler, self._position = scheduler, _position(scheduler)

    def forget(self) -> None:
        """The schedule was moved on purpose, by loading a state."""
        self._scheduler = self._position = None


def _position(scheduler: Any) -> Any:
    """Where a schedule is; None for one that does not say."""
    for name in ("last_batch_iteration", "last_epoch"):
        position = getattr(scheduler, name, None)
        if position is not None:
            return position
    return None


FLAGS: Final[tuple[tuple[str, type, Any, str], ...]] = (
    ("lr_range_test_min_lr", float, 0.001, "LRRangeTest: rate to start from"),
    ("lr_range_test_step_rate", float, 1.0, "LRRangeTest: what one interval adds, as a multiple of the start"),
    ("lr_range_test_step_size", int, 1000, "LRRangeTest: steps of one interval"),
    ("lr_range_test_staircase", bool, False, "LRRangeTest: raise the rate once per interval"),
    ("cycle_first_step_size", int, 1000, "OneCycle: steps of the way up"),
    ("cycle_first_stair_count", int, -1, "OneCycle: stairs of the way up; -1 is none"),
    ("cycle_second_step_size", int, -1, "OneCycle: steps of the way down; -1 is as many"),
    ("cycle_second_stair_count", int, -1, "OneCycle: stairs of the way down; -1 is none"),
    ("decay_step_size", int, 1000, "OneCycle: steps of one interval of decay after the cycle"),
    ("cycle_min_lr", float, 0.01, "OneCycle: rate at both ends of the cycle"),
    ("cycle_max_lr", float, 0.1, "OneCycle: rate at its top"),
    ("decay_lr_rate", float, 0.0, "OneCycle: decay of the rate per interval"),
    ("cycle_momentum", bool, False, "OneCycle: cycle the momentum too"),
    ("cycle_min_mom", float, 0.8, "OneCycle: momentum at the top of the cycle"),
    ("cycle_max_mom", float, 0.9, "OneCycle: momentum at both ends"),
    ("decay_mom_rate", float, 0.0, "OneCycle: growth of the momentum per interval of decay"),
    ("warmup_min_lr", float, 0, "warm-up: rate to start from"),
    ("warmup_max_lr", float, 0.001, "warm-up: rate to reach"),
    ("warmup_num_steps", int, 1000, "warm-up: its steps"),
    ("warmup_type", str, "log", "warm-up: log or linear"),
    ("warmup_min_ratio", float, 0.01, "WarmupCosineLR: part of each rate to start from"),
    ("cos_min_ratio", float, 0.01, "WarmupCosineLR: part of each rate at the end"),
)
"""Name, type, default and meaning. Names and defaults are those that scripts already rely on."""


def _flag(word: str) -> bool:
    """The word after a flag, which may have none: scripts write `--cycle_momentum true` as well."""
    if word.lower() not in ("true", "false", "1", "0"):
        raise ArgumentTypeError(f"'{word}' is not true or false")
    return word.lower() in ("true", "1")


def add_tuning_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--lr_schedule` and one flag for every argument of the schedules; returns the parser."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", type=str, default=None, help=f"schedule: {', '.join(VALID_LR_SCHEDULES)}")
    for name, kind, default, text in FLAGS:
        if kind is bool:
            group.add_argument(f"--{name}", default=default, nargs="?", const=True, type=_flag, help=text)
        else:
            group.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser
