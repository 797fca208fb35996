"""The public names. Each is imported from the module that defines it when it is first used; `import mizzen` loads none.

A name is listed twice: in the table for Python, above it for type checkers. tests/house/test_exports.py compares them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mizzen import checkpoint as checkpoint
    from mizzen import checkpointing as checkpointing
    from mizzen import comm as comm
    from mizzen import pipe as pipe
    from mizzen import tensor as tensor
    from mizzen import zero as zero
    from mizzen.accelerator import get_accelerator as get_accelerator
    from mizzen.accelerator import set_accelerator as set_accelerator
    from mizzen.api import add_config_arguments as add_config_arguments
    from mizzen.api import initialize as initialize
    from mizzen.comm import init_distributed as init_distributed
    from mizzen.data.loader import RepeatingLoader as RepeatingLoader
    from mizzen.engine.engine import Engine as Engine
    from mizzen.errors import CheckpointError as CheckpointError
    from mizzen.errors import CommError as CommError
    from mizzen.errors import ConfigError as ConfigError
    from mizzen.errors import DeviceError as DeviceError
    from mizzen.errors import FileError as FileError
    from mizzen.errors import LaunchError as LaunchError
    from mizzen.errors import LayoutError as LayoutError
    from mizzen.errors import MissingExtra as MissingExtra
    from mizzen.errors import MizzenError as MizzenError
    from mizzen.errors import NotBuilt as NotBuilt
    from mizzen.errors import PlanError as PlanError
    from mizzen.errors import StepError as StepError
    from mizzen.errors import UsageError as UsageError
    from mizzen.monitor.report import StepReport as StepReport
    from mizzen.optim.schedules import add_tuning_arguments as add_tuning_arguments

__version__ = "0.1.0"

_HOMES: Final = {
    "CheckpointError": "mizzen.errors",
    "CommError": "mizzen.errors",
    "ConfigError": "mizzen.errors",
    "DeviceError": "mizzen.errors",
    "Engine": "mizzen.engine.engine",
    "FileError": "mizzen.errors",
    "LaunchError": "mizzen.errors",
    "LayoutError": "mizzen.errors",
    "MissingExtra": "mizzen.errors",
    "MizzenError": "mizzen.errors",
    "NotBuilt": "mizzen.errors",
    "PlanError": "mizzen.errors",
    "RepeatingLoader": "mizzen.data.loader",
    "StepError": "mizzen.errors",
    "StepReport": "mizzen.monitor.report",
    "UsageError": "mizzen.errors",
    "add_config_arguments": "mizzen.api",
    "add_tuning_arguments": "mizzen.optim.schedules",
    "checkpoint": "mizzen.checkpoint",
    "checkpointing": "mizzen.checkpointing",
    "comm": "mizzen.comm",
    "get_accelerator": "mizzen.accelerator",
    "init_distributed": "mizzen.comm",
    "initialize": "mizzen.api",
    "pipe": "mizzen.pipe",
    "set_accelerator": "mizzen.accelerator",
    "tensor": "mizzen.tensor",
    "zero": "mizzen.zero",
}
"""Public name -> where it is defined. A module that is public itself is its own home: `"zero": "mizzen.zero"`."""

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mizzen' has no attribute {name!r}", name=name, obj=import_module("mizzen"))
    home = import_module(_HOMES[name])
    return home if home.__name__ == f"mizzen.{name}" else getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
