"""`optimizer` and `scheduler`: a name and its arguments, and which names there are.

The classes behind the names are found where they are built. `load` does not judge them: who gives an optimizer to
`initialize` may have anything in the file.
"""

import difflib
from collections.abc import Iterable
from typing import Final

from mizzen.config.section import Arguments, Flag, Name, Section, empty, no_effect, shown
from mizzen.errors import ConfigError

OPTIMIZERS: Final = (
    *("Adam", "AdamW", "SGD", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Lion"),
    *("Adafactor", "Lamb", "Muon"),
)
LOW_BIT: Final = ("Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8")
"""Of torchao: element by element but for the scale that the states of 256 neighbours share."""
NOT_ELEMENTWISE: Final = frozenset(("adafactor", "lamb", "muon", *map(str.lower, LOW_BIT)))
"""Rules that look at more than one element at a time."""
_SENT: Final = "it needs compressed communication"
_WIDTH: Final = "it needs the widths that the mup package records; give an optimizer of that package to initialize()"
UNBUILT: Final = {
    "lbfgs": "it evaluates the model several times in one step",
    "sparseadam": "it needs sparse gradients, and gradients are kept in flat buffers",
    "onebitadam": _SENT,
    "zerooneadam": _SENT,
    "onebitlamb": _SENT,
    "muadam": _WIDTH,
    "muadamw": _WIDTH,
    "musgd": _WIDTH,
}
"""Names that users know -> why they do not work yet."""
SCHEDULES: Final = (
    *("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
    *("StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "CosineAnnealingLR", "ReduceLROnPlateau"),
    *("CyclicLR", "CosineAnnealingWarmRestarts", "OneCycleLR", "PolynomialLR"),
)
"""Ours, then those of torch."""
NOT_FROM_JSON: Final = {
    "lambdalr": "it takes a function",
    "multiplicativelr": "it takes a function",
    "sequentiallr": "it takes other schedules",
    "chainedscheduler": "it takes other schedules",
}
_OTHER_NAMES: Final = {"muonwithauxadam": "muon"}


class OptimizerConfig(Section):
    """An optimizer by name."""

    type: Name
    """Name of the rule, such as AdamW or Muon; names of ours in any case, others as in torch.optim."""
    params: Arguments = empty()
    """Arguments of the rule, such as lr and betas."""
    legacy_fusion: Flag = no_effect(False, "there is one fused step, in torch")
    """Use the old fused implementation."""


class SchedulerConfig(Section):
    """A learning-rate schedule by name."""

    type: Name
    """Name of the schedule, such as WarmupCosineLR, or of a class in torch.optim.lr_scheduler."""
    params: Arguments = empty()
    """Arguments of the schedule, such as warmup_num_steps."""


def rule_of(name: str) -> str:
    """The rule that an optimizer's name means, in small letters: FusedAdam and DeepSpeedCPUAdam are Adam."""
    bare = name.lower().removeprefix("deepspeed").removeprefix("cpu").removeprefix("fused")
    return _OTHER_NAMES.get(bare, bare)


def check_optimizer(name: str) -> None:
    """Refuse a name that no optimizer has, in any case."""
    path, known = "optimizer.type", (*OPTIMIZERS, *LOW_BIT)
    if (why := UNBUILT.get(rule_of(name))) is not None:
        raise ConfigError(path, f"{name} is not built yet: {why}; known: {', '.join(sorted(known))}")
    if rule_of(name) not in map(str.lower, known):
        raise unknown(path, f"no optimizer is called {shown(name)}", name, known)


def check_scheduler(name: str) -> None:
    """Refuse a name that no schedule has, in any case."""
    path = "scheduler.type"
    if (why := NOT_FROM_JSON.get(name.lower())) is not None:
        raise ConfigError(path, f"{name} cannot come from JSON, since {why}: give it to initialize()")
    if name.lower() not in map(str.lower, SCHEDULES):
        raise unknown(path, f"no schedule is called {shown(name)}", name, SCHEDULES)


def unknown(path: str, what: str, given: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not known, with the nearest one or all that are."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(given.lower(), names, n=1)
    way_out = f"did you mean '{names[near[0]]}'?" if near else f"known: {', '.join(sorted(names.values()))}"
    return ConfigError(path, f"{what}; {way_out}")
