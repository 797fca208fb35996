"""`initialize` and its neighbours: mizzen's own, with an engine that has what clients reach for."""

from argparse import ArgumentParser, Namespace
from inspect import BoundArguments, signature
from typing import Any, Final

from torch import nn

from deepspeed.faces import parameters
from deepspeed.faces.config import without_hints
from deepspeed.faces.engine import dress
from mizzen import api
from mizzen.errors import NotBuilt
from mizzen.zero import Init as MizzenInit

SOURCES: Final = ("config", "config_params")
"""Arguments that are a configuration."""


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
    path = getattr(given.get("args"), "deepspeed_config", None)
    if path is not None:
        given["args"] = Namespace(deepspeed_config=without_hints(path))
    return bound


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

    def __init__(self, *args: Any, tensor_overrides: Any = None, **kwargs: Any) -> None:
        if tensor_overrides is not None and {*tensor_overrides} != {*parameters.DeepSpeedTensorOverride}:
            raise NotBuilt(
                f"zero.Init(tensor_overrides={tensor_overrides}): what is built inside gets the dtype and the device "
                "of the configuration; only both together are built: leave the argument out"
            )
        super().__init__(*args, **kwargs)

    def __enter__(self) -> "Init":
        """Modules that are built from here on are sharded."""
        super().__enter__()
        if self.is_wanted:
            parameters.install()
        return self


def is_compile_supported() -> bool:
    """Whether torch.compile can be used."""
    return True
