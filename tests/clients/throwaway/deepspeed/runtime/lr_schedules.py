"""The names of the schedules that a configuration can ask for."""

from mizzen.optim.schedules import VALID_LR_SCHEDULES

__all__ = ["VALID_LR_SCHEDULES"]
