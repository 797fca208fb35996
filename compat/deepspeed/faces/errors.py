"""mizzen's errors for programs that catch others: each stays what it is, and is also what its caller looks for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from mizzen.errors import CheckpointError, ConfigError, LayoutError, MizzenError


class ElasticityError(ConfigError):
    """An elastic batch that cannot be had."""


class ElasticityConfigError(ElasticityError):
    """The section `elasticity` is wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError, LayoutError):  # noqa: N818  (a name that scripts catch)
    """A number of GPUs that the elastic batch does not fit."""

    def __init__(self, path: str, message: str) -> None:
        ConfigError.__init__(self, path, message)


class MissingFolder(CheckpointError, FileNotFoundError):
    """A folder of checkpoints that is not there."""


ALSO: Final = "_also"
"""Of a joined class: the class of mizzen's, and what it was joined with."""


@contextmanager
def also(*kinds: type[Exception]) -> Iterator[None]:
    """Inside, errors of mizzen are also of these kinds. It decorates functions, too."""
    try:
        yield
    except MizzenError as error:
        if not isinstance(error, OSError):  # these have another layout in memory
            kind, earlier = vars(type(error)).get(ALSO, (type(error), ()))
            error.__class__ = _joined(kind, tuple(dict.fromkeys((*earlier, *kinds))))
        raise


@contextmanager
def elastic() -> Iterator[None]:
    """Inside, what is wrong with an elastic batch is an `ElasticityError`."""
    try:
        yield
    except ElasticityError:
        raise
    except LayoutError as error:
        if "elastic" not in str(error):
            raise
        raise ElasticityIncompatibleWorldSize("", str(error)) from error
    except ConfigError as error:
        if error.path.partition(".")[0] != "elasticity":
            raise
        raise ElasticityConfigError(error.path, error.message) from error


@cache
def _joined(kind: Any, kinds: tuple[type[Exception], ...]) -> type[MizzenError]:
    """A class of errors that is also these."""
    more = tuple(each for each in kinds if not issubclass(kind, each))
    if not more:
        return kind  # type: ignore[no-any-return]

    def reduce(error: MizzenError) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _rebuilt, (kind, kinds, error.args, vars(error))

    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce__": reduce, ALSO: (kind, kinds)}
    return type(kind.__name__, (kind, *more), {**own, "__doc__": kind.__doc__})


def _rebuilt(
    kind: Any, kinds: tuple[type[Exception], ...], args: tuple[Any, ...], state: dict[str, Any]
) -> MizzenError:
    """An error as it was, in another process."""
    joined: Any = _joined(kind, kinds)
    found: MizzenError = joined.__new__(joined, *args)
    found.args = args
    vars(found).update(state)
    return found
