"""Which accelerator this process uses: the one asked for, or the first that is there. Knows names, not devices.

An accelerator comes from a factory without arguments. Factories are found, the first one winning for a name, among
those that the application registered, the `mizzen.accelerators` entry points of installed packages, and our own.
"""

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Final

from mizzen.accelerator.protocol import Accelerator
from mizzen.ambient import AMBIENT
from mizzen.environment import Switches, environ
from mizzen.errors import DeviceError, UsageError
from mizzen.log import warn_once

Factory = Callable[[], Accelerator]

GROUP: Final = "mizzen.accelerators"
# Paths, because importing any of them imports torch.
OWN: Final = {
    "cuda": "mizzen.accelerator.cuda:Cuda",
    "xpu": "mizzen.accelerator.device:xpu",
    "mps": "mizzen.accelerator.mps:Mps",
}
BY_TORCH: Final = "mizzen.accelerator.device:by_torch"
HOST: Final = "mizzen.accelerator.cpu:Cpu"
BROKEN: Final = (ImportError, AttributeError, OSError, RuntimeError)
"""What a vendor's package raises when a library, a name or a driver that it needs is not there."""


def get_accelerator() -> Accelerator:
    """The accelerator of this process; the first call decides by MIZZEN_ACCELERATOR or DS_ACCELERATOR, or looks."""
    if AMBIENT.accelerator is None:
        wanted = Switches.read(environ()).accelerator
        set_accelerator(_asked_for(wanted) if wanted else _detect())
    found: Accelerator = AMBIENT.accelerator
    return found


def set_accelerator(accelerator: Accelerator | None) -> None:
    """Use this one from now on; None lets the next `get_accelerator` decide again."""
    wanted = sorted(name for name in {*Accelerator.__annotations__, *vars(Accelerator)} if not name.startswith("_"))
    missing = [name for name in wanted if isinstance(accelerator, type) or not hasattr(accelerator, name)]
    if accelerator is not None and missing:
        raise UsageError(
            f"set_accelerator: {accelerator!r} is no accelerator, it has no {', '.join(missing[:3])} "
            f"({len(missing)} of {len(wanted)} are missing): give create_accelerator(name), or see docs/accelerators.md"
        )
    AMBIENT.accelerator = accelerator


def register_accelerator(name: str, factory: Factory) -> None:
    """Make `name` known. It is tried before ours, and may replace one of them. Register before the first use."""
    AMBIENT.accelerator_factories[name] = factory


def create_accelerator(name: str) -> Accelerator:
    """The accelerator of that name; an error with the reason when it is unknown or cannot be used here."""
    factories = _factories()
    if name not in factories:
        known = ", ".join(sorted(factories))
        raise DeviceError(f"accelerator {name!r} is unknown; available names: {known}. docs/accelerators.md adds one")
    accelerator, reason = _attempt(factories[name])
    if accelerator is None or reason is not None:
        raise DeviceError(f"accelerator {name!r} was asked for, but {reason}")
    return accelerator


def survey() -> dict[str, str | None]:
    """Every known name with the reason why it cannot be used here, or None."""
    return {name: _attempt(factory)[1] for name, factory in _factories().items()}


def _asked_for(name: str) -> Accelerator:
    try:
        return create_accelerator(name)
    except DeviceError as error:
        raise DeviceError(f"{error} (MIZZEN_ACCELERATOR or DS_ACCELERATOR asks; without them we look)") from error


def _detect() -> Accelerator:
    for name, factory in _factories().items():
        accelerator, reason = _attempt(factory)
        if accelerator is not None and reason is None:
            return accelerator
        if accelerator is None:
            warn_once(f"accelerator {name!r} cannot be asked, so the next one is tried: {reason}")
    raise DeviceError(f"no accelerator can be used, not even the host: {survey()}")


def _attempt(factory: Factory) -> tuple[Accelerator | None, str | None]:
    try:
        accelerator = factory()
        return accelerator, accelerator.unavailable()
    except BROKEN as error:
        return None, f"it does not start: {type(error).__name__}: {error}"


def _factories() -> dict[str, Factory]:
    """Every factory by name, in the order in which they are tried; the host comes last."""
    from importlib import metadata  # with torch, the slow part of this module: nothing is paid at import

    import torch

    factories: dict[str, Factory] = dict(AMBIENT.accelerator_factories)
    for entry in metadata.entry_points(group=GROUP):
        factories.setdefault(entry.name, partial(_load, f"{entry.module}:{entry.attr}"))
    for name, path in OWN.items():
        factories.setdefault(name, partial(_load, path))
    # A vendor's extension may have told torch of its device without telling us. Better used by torch's common interface
    # than passed over in silence for the host.
    if (device := torch.accelerator.current_accelerator()) is not None:
        factories.setdefault(device.type, partial(_load, BY_TORCH, device.type))
    factories.setdefault("cpu", partial(_load, HOST))
    return factories


def _load(path: str, *arguments: str) -> Accelerator:
    accelerator: Accelerator = resolve_name(path)(*arguments)
    return accelerator
