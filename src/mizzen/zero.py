"""`mizzen.zero`: access to parameters, gradients and states by the parameter alone. A face: the work is elsewhere."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Final

import torch
from torch import nn

from mizzen.config.load import ConfigSource
from mizzen.engine.access import (
    full_gradient,
    full_state,
    full_value,
    gathered,
    local_gradient,
    local_state,
    local_value,
    set_full_gradient,
    set_full_state,
    set_full_value,
    set_local_gradient,
    set_local_state,
    set_local_value,
    update_gradients,
)
from mizzen.engine.engine import Engine
from mizzen.errors import UsageError, expect
from mizzen.log import warn_once
from mizzen.parallel.zero.full.init import ShardedInit, find, is_in_pinned, is_pinned, pin, register_use, unregister_use
from mizzen.parallel.zero.full.sharded_parameter import facts_of
from mizzen.rewrite.tiled import Tiled

safe_get_full_fp32_param = full_value
safe_get_full_grad = full_gradient
safe_get_full_optimizer_state = full_state
safe_set_full_fp32_param = set_full_value
safe_set_full_grad = set_full_gradient
safe_set_full_optimizer_state = set_full_state
safe_update_full_grad_vectorized = update_gradients
safe_get_local_fp32_param = local_value
safe_get_local_grad = local_gradient
safe_get_local_optimizer_state = local_state
safe_set_local_fp32_param = set_local_value
safe_set_local_grad = set_local_gradient
safe_set_local_optimizer_state = set_local_state


IN_THE_CONFIGURATION: Final = {"zero_quantized_weights", "zero_quantized_nontrainable_weights"}
WITHOUT_EFFECT: Final = {"zero_param_parallel_group", "sequence_data_parallel_group", "param_swapper"}
"""Arguments of `Init` that scripts pass, and that the engine's own groups make needless."""


def _data_group(mpu: Any) -> Any:
    """The ranks that share what they build: by the user's own groups, of which the others have another model."""
    if mpu is None:
        return None
    if "get_data_parallel_group" not in dir(mpu):
        raise UsageError(
            f"zero.Init(mpu=): a {type(mpu).__name__} has no get_data_parallel_group(), and parameters would be shared "
            "out among ranks that build different ones; give data_parallel_group="
        )
    return mpu.get_data_parallel_group()


class Init(ShardedInit):
    """Inside, modules are sharded as they are built; `Init(module=model)` shards one that is there."""

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: ConfigSource | None = None,
        config: ConfigSource | None = None,
        enabled: bool = True,
        dtype: Any = None,
        mpu: Any = None,
        **others: Any,
    ) -> None:
        if unknown := others.keys() - IN_THE_CONFIGURATION - WITHOUT_EFFECT:
            raise UsageError(f"zero.Init has no argument {', '.join(sorted(unknown))}")
        for name in sorted(IN_THE_CONFIGURATION & {name for name, value in others.items() if value}):
            warn_once(f"zero.Init({name}=...) changes nothing here: zero_optimization.{name} of the configuration does")
        super().__init__(
            module,
            group=_data_group(mpu) if data_parallel_group is None else data_parallel_group,
            remote_device=remote_device,
            config=config_dict_or_path if config_dict_or_path is not None else config,
            enabled=enabled,
            dtype=dtype,
        )


class TiledLinear(Tiled):
    """What `linear_cls(in_features, out_features)` computes, in tiles that stage 3 gathers one by one."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            splits=(in_splits, out_splits),
            input_is_already_split=input_is_already_split,
            combine_out_splits=combine_out_splits,
            make=lambda columns, rows, has_bias: linear_cls(columns, rows, bias=has_bias, **kwargs),
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    @property
    def in_parts(self) -> list[int]:
        """Where the parts of the input begin, and where the last one ends."""
        return list(accumulate(self.in_sizes, initial=0))

    @property
    def out_parts(self) -> list[int]:
        """Where the parts of the output begin, and where the last one ends."""
        return list(accumulate(self.out_sizes, initial=0))

    def copy_params_from(self, other: nn.Module) -> None:
        """Take the weight and bias of a layer that is not in tiles, sharded or not."""
        expect(other, nn.Module, "a layer with a weight")
        with gathered(list(other.parameters()), None):
            super().copy_params_from(other)


class TiledLinearReturnBias(TiledLinear):
    """A `TiledLinear` over layers that return (output, bias) and leave the addition to whoever has called them."""

    returns_bias = True


@contextmanager
def GatheredParameters(  # noqa: N802  (a name that users have in their scripts)
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Inside, the parameters are whole; what `modifier_rank` writes to them reaches every rank, masters included."""
    with gathered(params if enabled else (), modifier_rank):
        yield


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say, before `initialize`, that a module uses a parameter it does not hold: it then belongs to the whole model."""
    register_use(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take it back, before `initialize`."""
    unregister_use(parameter)


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, all parameters are whole and nothing is communicated: what runs there may differ between the ranks."""
    expect(model, nn.Module, "an engine or a model")
    inner = model.module if isinstance(model, Engine) else model
    with gathered(list(inner.parameters()), None):
        yield inner


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Pin all modules of these classes, before `initialize`: each is gathered as one unit, whatever runs inside."""
    return _pin_all(model, leaf_module_classes, "class", raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Pin modules by their full names."""
    return _pin_all(model, module_names, "name", raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Pin modules by the ends of their names."""
    return _pin_all(model, module_suffixes, "suffix", raise_if_not_found)


def _pin_all(model: nn.Module, wanted: Sequence[type | str], how: str, must_be_there: bool) -> list[nn.Module]:
    found = find(model, wanted, how=how, must_be_there=must_be_there)
    for module in found:
        pin(module)
    return found


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the pins of modules of these classes away."""
    found = find(model, leaf_module_classes, must_be_there=raise_if_not_found)
    for module in found:
        pin(module, False)
    return found


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Pin one module, or take its pin away."""
    pin(model, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All pinned modules of a model."""
    expect(model, nn.Module, "a module")
    return [module for module in model.modules() if is_pinned(module)]


z3_leaf_module, z3_leaf_parameter = is_pinned, is_in_pinned


@contextmanager
def OnDevice(dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> Iterator[None]:  # noqa: N802
    """Inside, modules are built on a device, and in a dtype."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        place = torch.device(device)
    except (TypeError, RuntimeError) as error:
        torch.set_default_dtype(before)
        raise UsageError(f"OnDevice(dtype={dtype!r}, device={device!r}) cannot be: {error}") from error
    try:
        with place:
            yield
    finally:
        torch.set_default_dtype(before)


__all__ = [
    "GatheredParameters",
    "Init",
    "OnDevice",
    "TiledLinear",
    "TiledLinearReturnBias",
    "facts_of",
    "get_z3_leaf_modules",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unregister_external_parameter",
    "unset_z3_leaf_modules",
    "unwrap_model_for_generation",
    "z3_leaf_module",
    "z3_leaf_parameter",
]
