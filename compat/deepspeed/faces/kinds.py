"""The class of engines, for `isinstance`, without loading them: clients ask of every model, also where none is used."""

import sys
from abc import ABCMeta
from importlib import import_module
from typing import Any, Final, NoReturn

from mizzen.errors import UsageError

HOME: Final = "mizzen.engine.engine"


class _Kind(ABCMeta):
    def __instancecheck__(cls, instance: object) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        home = sys.modules.get(HOME) if cls is DeepSpeedEngine else None  # before that is loaded there is no engine
        return type.__subclasscheck__(cls, subclass) or (home is not None and issubclass(subclass, home.Engine))

    def __getattr__(cls, name: str) -> Any:
        return getattr(import_module(HOME).Engine, name)

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise UsageError("engines are made by initialize(): deepspeed.initialize(model=..., config=...)")


class DeepSpeedEngine(metaclass=_Kind):
    """Every engine is one. Its methods are those of mizzen's engine."""
