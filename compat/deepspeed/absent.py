"""Stand-ins for names whose capability mizzen does not have yet: they can be imported, and say so when used."""

from abc import ABCMeta
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

from mizzen.errors import NotBuilt


class _Absent(ABCMeta):
    """The class of such a class: an instance or a class method of it cannot be had. `ABC` may stand beside it."""

    _path: str
    _capability: str

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotBuilt(_message(cls._path, cls._capability))

    def __getattr__(cls, name: str) -> Callable[..., NoReturn]:
        if name.startswith("_"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        path, _, own = cls._path.rpartition(".")
        return _refusing(path, f"{own}.{name}", cls._capability)


def _message(path: str, capability: str) -> str:
    return f"{path} waits for a capability that is not built yet: {capability}"


@cache
def _refusing(path: str, name: str, capability: str) -> Callable[..., NoReturn]:
    """A function that refuses. It says where it is found, as a function of a file does: pickling looks it up there."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotBuilt(_message(f"{path}.{name}", capability))

    refuse.__module__, refuse.__qualname__ = path, name
    refuse.__name__ = name.rpartition(".")[2]
    refuse.__doc__ = f"Waits for {capability}."
    return refuse


@cache
def absent(path: str, name: str, capability: str, base: type | None = None) -> Any:
    """One object per name, wherever it is imported from: a class where names are written so, otherwise a function."""
    if not name.lstrip("_")[:1].isupper():
        return _refusing(path, name, capability)
    own = {"_path": f"{path}.{name}", "_capability": capability}
    body = {"__module__": path, "__doc__": f"Waits for {capability}.", **own}
    return _Absent(name, () if base is None else (base,), body)
