"""Command-line flags for schedules, for scripts that choose theirs there. Nothing in the library reads them."""

from argparse import ArgumentParser, ArgumentTypeError
from typing import Any, Final

from mizzen.optim.schedules import VALID_LR_SCHEDULES

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
