"""Files that a client completes: HF Trainer and Accelerate put their own values in the place of "auto".

They do so before they call `initialize`. Until then such a file is right, though not all of it is known.
"""

from typing import Final

from mizzen.config.batch import MICRO, TRAIN
from mizzen.config.schema import Config, Origin
from mizzen.errors import ConfigError, UsageError

TOTAL_STEPS: Final = "scheduler.params.total_num_steps"
OPEN_BATCH: Final = "filled in by the client; --batch N says how many samples a rank takes at once"
_LEFT_OPEN: Final = Origin("default", "until the client fills it in")


def check_filled_in(config: Config) -> None:
    """Refuse to make a schedule whose length is still "auto"."""
    if config.is_auto(TOTAL_STEPS):
        raise ConfigError(TOTAL_STEPS, '"auto", and no client has filled it in: give a value')


def with_batch(config: Config, micro: int | None) -> Config:
    """The configuration with the batch that a client would fill in: `micro` samples per forward pass of a rank.

    Without `micro`, a batch that the file leaves to the client is one sample, and `is_batch_open` says so.
    """
    if micro is not None:
        _check_open(config, micro)
        return _with_micro(config, micro, Origin("given", "as --batch"))
    is_left = config.is_auto(TRAIN) or config.is_auto(MICRO)
    is_known = config.elasticity.enabled or config.at(TRAIN) is not None or config.at(MICRO) is not None
    return config if is_known or not is_left else _with_micro(config, 1, _LEFT_OPEN)


def is_batch_open(config: Config) -> bool:
    """Whether only a client knows the batch."""
    return config.origin(MICRO) == _LEFT_OPEN


def _check_open(config: Config, micro: int) -> None:
    if config.elasticity.enabled:
        raise UsageError(f"--batch {micro}: the batch of this file is that of its section elasticity")
    if (given := config.at(MICRO)) is not None:
        raise UsageError(f"--batch {micro}: the file itself has {MICRO} = {given}")


def _with_micro(config: Config, micro: int, origin: Origin) -> Config:
    return config.model_copy(update={MICRO: micro}).with_origins({MICRO: origin})
