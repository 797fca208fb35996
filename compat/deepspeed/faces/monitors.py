"""Monitors of one sink each, made from their section of the configuration, and the one that serves them all."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any, ClassVar

from deepspeed.faces.config import DeepSpeedConfig, without_hints
from mizzen.config.load import load
from mizzen.config.schema import Config
from mizzen.config.section import Section
from mizzen.environment import World, environ
from mizzen.errors import MissingExtra
from mizzen.monitor.build import build_observers
from mizzen.monitor.sinks import monitor_of

Name, Value, GlobalSamples = str, Any, int
Event = tuple[str, Any, int]
"""(name, value, samples of all ranks)."""


class Monitor:
    """Somewhere to write numbers to; rank 0 writes."""

    key: ClassVar[str] = ""
    """The section that it reads."""

    def __init__(self, monitor_config: Any) -> None:
        self._monitor = monitor_of(build_observers(_settings(monitor_config, self.key), World.detect(environ())))
        self.monitor_config, self.enabled = monitor_config, self._monitor.enabled

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write (name, value, samples) of each."""
        self._monitor.write_events(event_list)

    def flush(self) -> None:
        """Make what was written so far safe."""
        self._monitor.flush()


class MonitorMaster(Monitor):
    """All that the configuration names."""


class TensorBoardMonitor(Monitor):
    """TensorBoard's files."""

    key = "tensorboard"


class WandbMonitor(Monitor):
    """Weights & Biases."""

    key = "wandb"


class csvMonitor(Monitor):  # noqa: N801
    """Files with commas."""

    key = "csv_monitor"


class CometMonitor(Monitor):
    """Comet."""

    key = "comet"


def _settings(given: Any, key: str) -> Config:
    """A configuration with this section alone, or with all of them."""
    if isinstance(given, DeepSpeedConfig):
        given = given.settings
    if isinstance(given, Config) and not key:
        return given
    if isinstance(given, Config):
        given = given.at(key)
    if isinstance(given, Section):
        given = given.model_dump(exclude_unset=True)
    given = dict(given) if isinstance(given, Mapping) else given
    return load({key: given} if key else without_hints(given))


def _need(package: str, module: str) -> None:
    if find_spec(module) is None:
        raise MissingExtra(package, extra="monitor", purpose=f"a monitor that writes to {package}")


def check_tb_availability() -> None:
    """An error where TensorBoard is not installed."""
    _need("tensorboard", "tensorboard")


def check_wandb_availability() -> None:
    """An error where Weights & Biases is not installed."""
    _need("wandb", "wandb")


def check_comet_availability() -> None:
    """An error where Comet is not installed."""
    _need("comet_ml", "comet_ml")
