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
        return _refusing(f"{cls._path}.{name}", cls._capability)


def _message(path: str, capability: str) -> str:
    return f"{path} waits for a capability that is not built yet: {capability}"


def _refusing(path: str, capability: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotBuilt(_message(path, capability))

    refuse.__name__ = refuse.__qualname__ = path.rpartition(".")[2]
    refuse.__doc__ = f"Waits for {capability}."
    return refuse


@cache
def absent(path: str, name: str, capability: str, base: type | None = None) -> Any:
    """One object per name, wherever it is imported from: a class where names are written so, otherwise a function."""
    if not name.lstrip("_")[:1].isupper():
        return _refusing(f"{path}.{name}", capability)
    own = {"_path": f"{path}.{name}", "_capability": capability}
    body = {"__module__": path, "__doc__": f"Waits for {capability}.", **own}
    return _Absent(name, () if base is None else (base,), body)
