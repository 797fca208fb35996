"""`initialize` and its neighbours: mizzen's own, with an engine that has what clients reach for."""

from argparse import ArgumentParser, Namespace
from inspect import BoundArguments, signature
from typing import Any, Final

import torch
from torch import nn

from deepspeed.faces import parameters
from deepspeed.faces.config import without_hints
from deepspeed.faces.engine import dress
from mizzen import api
from mizzen.errors import ConfigError, NotBuilt, UsageError
from mizzen.zero import Init as MizzenInit

SOURCES: Final = ("config", "config_params", "config_dict_or_path")
"""Arguments that are a configuration."""
FLAGS: Final = ("deepspeed_config", "deepscale_config")
"""Flags of scripts that name its file, the second by its old name."""


def initialize(*args: Any, **kwargs: Any) -> api.Setup:
    """mizzen's `initialize`, for configurations that clients have added keys of their own to."""
    bound = _without_hints(signature(api.initialize).bind(*args, **kwargs))
    engine, *others = api.initialize(*bound.args, **bound.kwargs)
    dress(engine)
    return engine, *others


initialize.__signature__ = signature(api.initialize)  # type: ignore[attr-defined]


def _without_hints(bound: BoundArguments) -> BoundArguments:
    """The arguments of a call, with the configuration as mizzen takes it, wherever it was given."""
    given = bound.arguments
    for name in SOURCES:
        if given.get(name) is not None:
            given[name] = without_hints(given[name])
    paths = [path for name in FLAGS if (path := getattr(given.get("args"), name, None)) is not None]
    if len(paths) > 1:
        raise ConfigError("", "--deepscale_config is an old name of --deepspeed_config: give one of them, not both")
    if paths:
        given["args"] = Namespace(deepspeed_config=without_hints(paths[0]))
    return bound


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """mizzen's own arguments, and their old names."""
    group = api.add_config_arguments(parser).add_argument_group("old names")
    group.add_argument("--deepscale", action="store_true", help="a flag for scripts to test; it changes nothing here")
    group.add_argument("--deepscale_config", default=None, metavar="FILE", help="the same as --deepspeed_config")
    return parser


def tp_model_init(model: nn.Module, tp_size: int, dtype: Any, config: Any = None, **kwargs: Any) -> nn.Module:
    """The model as it is; more than one rank for it waits for tensor parallelism."""
    if not isinstance(tp_size, int) or tp_size < 1 or not isinstance(dtype, torch.dtype):
        raise UsageError(
            f"tp_model_init(tp_size={tp_size!r}, dtype={dtype!r}): give a number of ranks and a torch.dtype"
        )
    if tp_size > 1:
        raise NotBuilt(f"tp_model_init(tp_size={tp_size}) waits for tensor parallelism, which is not built yet")
    return model.to(dtype)


class Init(MizzenInit):
    """mizzen's `zero.Init`; parameters then have the facts that other libraries hang on them."""

    def __init__(self, *args: Any, tensor_overrides: Any = None, **kwargs: Any) -> None:
        if tensor_overrides is not None and {*tensor_overrides} != {*parameters.DeepSpeedTensorOverride}:
            raise NotBuilt(
                f"zero.Init(tensor_overrides={tensor_overrides}): what is built inside gets the dtype and the device "
                "of the configuration; only both together are built: leave the argument out"
            )
        bound = _without_hints(signature(MizzenInit).bind(*args, **kwargs))
        super().__init__(*bound.args, **bound.kwargs)

    def __enter__(self) -> "Init":
        """Modules that are built from here on are sharded."""
        super().__enter__()
        if self.is_wanted:
            parameters.install()
        return self


def is_compile_supported() -> bool:
    """Whether torch.compile can be used."""
    return True
