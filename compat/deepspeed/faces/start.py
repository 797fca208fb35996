"""`initialize` and its neighbours: mizzen's own, with an engine that has what clients reach for."""

import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from inspect import signature
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from deepspeed.faces import parameters
from deepspeed.faces.config import arguments_without_hints, dtype_of
from deepspeed.faces.engine import TENSOR_PARALLEL, DeepSpeedEngine
from deepspeed.faces.errors import also
from mizzen import api
from mizzen.comm import groups
from mizzen.config.load import read_source
from mizzen.config.parallel import TensorParallelConfig
from mizzen.errors import NotBuilt, UsageError
from mizzen.zero import Init as MizzenInit

_PUBLIC: Final = [one for one in signature(api.initialize).parameters.values() if one.kind is not one.KEYWORD_ONLY]
SIGNATURE: Final = signature(api.initialize).replace(parameters=_PUBLIC)


def initialize(*args: Any, **kwargs: Any) -> api.Setup:
    """mizzen's `initialize`, for configurations that clients have added keys of their own to."""
    given = SIGNATURE.bind(*args, **kwargs).arguments
    _refuse_pipelines_of_clients(given.get("config") or given.get("config_params"))
    engine = DeepSpeedEngine(**given)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


CLIENTS: Final = {
    "transformers.trainer": "HF Trainer",
    "accelerate.accelerator": "Accelerate",
    "lightning.pytorch.strategies.deepspeed": "Lightning",
    "pytorch_lightning.strategies.deepspeed": "Lightning",
}
"""Modules of clients that run forward, backward and step themselves."""


def _refuse_pipelines_of_clients(config: Any) -> None:
    """Refuse stages to a client that cannot drive them, at the start rather than at its first forward."""
    stages = config.get("pipeline_parallel_size", 1) if isinstance(config, Mapping) else 1
    if stages in (1, "auto"):
        return
    found, frame = "", sys._getframe(1)
    while (outer := frame.f_back) is not None:
        found, frame = CLIENTS.get(str(outer.f_globals.get("__name__")), found), outer
    if found:
        raise UsageError(
            f"pipeline_parallel_size {stages} with {found}, which calls forward, backward and step itself: a pipeline "
            "runs a whole batch at once. Leave the key out (tensor_parallel.autotp_size and ZeRO stage 3 work there), "
            "or write the loop: engine, *_ = mizzen.initialize(...), then engine.train_batch(data_iter)"
        )


initialize.__signature__ = SIGNATURE  # type: ignore[attr-defined]


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """mizzen's own arguments, and their old names."""
    group = api.add_config_arguments(parser).add_argument_group("old names")
    group.add_argument("--deepscale", action="store_true", help="a flag for scripts to test; it changes nothing here")
    group.add_argument("--deepscale_config", default=None, metavar="FILE", help="the same as --deepspeed_config")
    return parser


def tp_model_init(model: nn.Module, tp_size: int, dtype: Any, config: Any = None, **kwargs: Any) -> nn.Module:
    """The model as it is; `initialize` splits it over so many ranks, unless its configuration says how many.

    `config` is a configuration, or its section `tensor_parallel` alone.
    """
    if not isinstance(tp_size, int) or tp_size < 1 or not isinstance(dtype, torch.dtype):
        raise UsageError(
            f"tp_model_init(tp_size={tp_size!r}, dtype={dtype!r}): give a number of ranks and a torch.dtype"
        )
    if kwargs.get("tp_group") is not None:
        raise NotBuilt("tp_model_init(tp_group=): groups are formed by initialize(); give tp_size alone")
    if tp_size > 1:
        given = read_source(config) if config is not None else {}
        is_section = given.keys() <= TensorParallelConfig.model_fields.keys() - {"tensor_parallel"}
        section = given if is_section else given.get("tensor_parallel", {})
        model.__dict__[TENSOR_PARALLEL] = {"tensor_parallel": {"autotp_size": tp_size, **section}}
    return model.to(dtype)


class Init(MizzenInit):
    """mizzen's `zero.Init`; parameters then have the facts that other libraries hang on them.

    With bf16 or fp16 in its configuration they have that dtype. One rank shards nothing and marks them all the same.
    """

    @also(AssertionError)
    def __init__(self, *args: Any, tensor_overrides: Any = None, **kwargs: Any) -> None:
        if tensor_overrides is not None and {*tensor_overrides} != {*parameters.DeepSpeedTensorOverride}:
            raise NotBuilt(
                f"zero.Init(tensor_overrides={tensor_overrides}): what is built inside gets the dtype and the device "
                "of the configuration; only both together are built: leave the argument out"
            )
        given = arguments_without_hints(signature(MizzenInit).bind(*args, **kwargs).arguments)
        given |= given.pop("others", {})
        if given.get("dtype") is None:
            given["dtype"] = dtype_of(given.get("config_dict_or_path") or given.get("config"))
        self._marking: RemovableHandle | None = None
        super().__init__(**given)
        if self.is_wanted and given.get("module") is not None:
            parameters.install()
            parameters.mark_built(given["module"], given["dtype"])

    def __enter__(self) -> "Init":
        """Modules that are built from here on are sharded, or marked where one rank has no one to share them with."""
        super().__enter__()
        if self.is_wanted:
            parameters.install()
            if self.building is None and self.depth == 1 and groups.get_world_size(self.group) == 1:
                self._marking = register_module_parameter_registration_hook(self._mark)
        return self

    def __exit__(self, *error: Any) -> None:
        """The end of it, as mizzen's."""
        if self._marking is not None and self.depth == 1:
            self._marking.remove()
            self._marking = None
        super().__exit__(*error)

    def _mark(self, module: nn.Module, name: str, parameter: Any) -> None:
        parameters.mark_parameter(parameter, self.dtype)


def is_compile_supported() -> bool:
    """Whether torch.compile can be used."""
    return True
