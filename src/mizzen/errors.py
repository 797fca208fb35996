"""Every error this library raises on purpose. `except MizzenError` catches them all.

MizzenError
├── ConfigError       the JSON is wrong: names the key path            (also a ValueError)
├── LayoutError       the degrees do not fit the world size            (also a ValueError)
├── PlanError         a feature, or two together, that cannot be done  (also a ValueError)
├── UsageError        a call in the wrong order or with wrong values   (also a RuntimeError and a ValueError)
│   └── NotBuilt      a known call whose capability does not exist yet (also a NotImplementedError)
├── StepError         training cannot go on: gradients stay not finite  (also a RuntimeError)
├── CheckpointError   missing, torn, or made for another model         (also a RuntimeError)
├── CommError         a collective failed: names rank, operation       (also a RuntimeError)
├── LaunchError       a job could not be started or did not end well   (also a RuntimeError)
├── DeviceError       an accelerator is missing or cannot do this      (also a RuntimeError)
├── FileError         a file operation failed: names path and cause    (also an OSError)
└── MissingExtra      an optional package is absent: names the extra   (also an ImportError)

Each says what was asked, the numbers, and the way out. Errors of other libraries are not wrapped here.
"""

import types
from typing import Any


class MizzenError(Exception):
    """The root of the tree."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickling would call the class with the finished message. One that takes other arguments would fail in the
        process that receives it, and whoever waits there would wait for ever."""
        usual: Any = super().__reduce__()
        return restored, (type(self), usual[1]), *usual[2:]


def restored(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An error from what `args` held, made as Python makes its own, without the `__init__` of its class."""
    error = kind.__new__(kind, *args)
    builtin: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    builtin.__init__(error, *args)
    return error


class ConfigError(MizzenError, ValueError):
    """A configuration that cannot be used; the message starts with the path of the key."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path
        self.message = message


class LayoutError(MizzenError, ValueError):
    """Parallel degrees that do not fit the number of ranks."""


class PlanError(MizzenError, ValueError):
    """A feature, or a combination of features, that cannot be planned."""


class UsageError(MizzenError, RuntimeError, ValueError):
    """A call made at the wrong time or with the wrong kind of value."""


class NotBuilt(UsageError, NotImplementedError):
    """A call that users know, for a capability that this version does not have."""


class StepError(MizzenError, RuntimeError):
    """Training that cannot go on, because step after step had to be skipped."""


class CheckpointError(MizzenError, RuntimeError):
    """A checkpoint that is missing, torn, damaged, or made for another model."""


class CommError(MizzenError, RuntimeError):
    """A collective that failed, or ranks that parted ways."""


class LaunchError(MizzenError, RuntimeError):
    """A job that could not be started, or that ended badly."""


class DeviceError(MizzenError, RuntimeError):
    """An accelerator that is absent or cannot do what was asked."""


class FileError(MizzenError, OSError):
    """A file operation that failed."""


class MissingExtra(MizzenError, ImportError):
    """An optional dependency that is not installed."""

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs '{package}', which is not installed: pip install 'mizzen[{extra}]'")
        self.package = package
        self.extra = extra


def expect(value: object, kind: type | types.UnionType, what: str) -> None:
    """Refuse a value of another kind than the one that a call takes."""
    if not isinstance(value, kind):
        raise UsageError(f"{what} is wanted; this is a {type(value).__name__}")
