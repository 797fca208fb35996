"""Optional packages, imported where they are used. An absent one is an error that names the extra to install."""

from importlib import import_module
from types import ModuleType

from mizzen.errors import MissingExtra


def require(package: str, *, extra: str, purpose: str) -> ModuleType:
    """The module of an optional package; `purpose` is the key that asked for it."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise  # it is there and lacks something of its own, which its own error names
        raise MissingExtra(package, extra=extra, purpose=purpose) from error
