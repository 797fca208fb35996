"""`initialize` and its neighbours: mizzen's own, with an engine that has what clients reach for."""

from argparse import ArgumentParser
from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import nn

from deepspeed.faces import parameters
from deepspeed.faces.engine import dress
from mizzen import api
from mizzen.config.migrate import name_keys, spread_paths
from mizzen.config.schema import Config
from mizzen.config.source import read_source
from mizzen.errors import NotBuilt
from mizzen.log import warn_once
from mizzen.zero import Init as MizzenInit


def initialize(*args: Any, **kwargs: Any) -> api.Setup:
    """mizzen's `initialize`, for configurations that clients have added keys of their own to."""
    bound = signature(api.initialize).bind(*args, **kwargs).arguments
    for name in ("config", "config_params"):
        if isinstance(given := bound.get(name), Mapping):
            bound[name] = without_hints(given)
    engine, *others = api.initialize(**bound)
    dress(engine)
    return engine, *others


initialize.__signature__ = signature(api.initialize)  # type: ignore[attr-defined]


def without_hints(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration without keys with dots at its top that point to nothing; the same object if it has none."""
    unknown = [key for key in config if "." in key and not _is_path(key)]
    if not unknown:
        return config
    warn_once(f"keys with dots that point to no key of the configuration are not looked at: {', '.join(unknown)}")
    return {key: value for key, value in config.items() if key not in unknown}


def _is_path(key: str) -> bool:
    raw = read_source({key: None})
    spread_paths(raw)
    return not name_keys(raw, Config)


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """mizzen's own arguments."""
    return api.add_config_arguments(parser)


def tp_model_init(model: nn.Module, tp_size: int, dtype: Any, config: Any = None, **kwargs: Any) -> nn.Module:
    """The model as it is; more than one rank for it waits for tensor parallelism."""
    if tp_size > 1:
        raise NotBuilt(f"tp_model_init(tp_size={tp_size}) waits for tensor parallelism, which is not built yet")
    return model.to(dtype)


class Init(MizzenInit):
    """mizzen's `zero.Init`; parameters then have the facts that other libraries hang on them."""

    def __enter__(self) -> "Init":
        """Modules that are built from here on are sharded."""
        super().__enter__()
        if self.is_wanted:
            parameters.install()
        return self


def is_compile_supported() -> bool:
    """Whether torch.compile can be used."""
    return True
