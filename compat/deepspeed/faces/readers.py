"""Functions that read one value, or one section, out of the dict of a configuration."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from deepspeed.faces.config import DeepSpeedZeroConfig
from mizzen.config.load import load

VALUES: Final = {
    "get_train_batch_size": "train_batch_size",
    "get_train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "get_gradient_accumulation_steps": "gradient_accumulation_steps",
    "get_managed_gradient_accumulation": "managed_gradient_accumulation",
    "get_gradient_clipping": "gradient_clipping",
    "get_gradient_predivide_factor": "gradient_predivide_factor",
    "get_gradient_allreduce_op": "gradient_allreduce_op",
    "get_prescale_gradients": "prescale_gradients",
    "get_sparse_gradients_enabled": "sparse_gradients",
    "get_communication_data_type": "communication_data_type",
    "get_steps_per_print": "steps_per_print",
    "get_disable_allgather": "disable_allgather",
    "get_dump_state": "dump_state",
    "get_graph_harvesting": "graph_harvesting",
    "get_wall_clock_breakdown": "wall_clock_breakdown",
    "get_memory_breakdown": "memory_breakdown",
    "get_log_level": "log_level",
    "get_dataloader_drop_last": "dataloader_drop_last",
    "get_optimizer_name": "optimizer.type",
    "get_optimizer_params": "optimizer.params",
    "get_optimizer_legacy_fusion": "optimizer.legacy_fusion",
    "get_scheduler_name": "scheduler.type",
    "get_scheduler_params": "scheduler.params",
    "get_zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "get_zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "get_pld_enabled": "progressive_layer_drop.enabled",
    "get_amp_enabled": "amp.enabled",
    "get_torch_autocast_enabled": "torch_autocast.enabled",
    "get_torch_autocast_dtype": "torch_autocast.dtype",
    "get_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "get_eigenvalue_enabled": "eigenvalue.enabled",
    "get_eigenvalue_verbose": "eigenvalue.verbose",
    "get_eigenvalue_max_iter": "eigenvalue.max_iter",
    "get_eigenvalue_tol": "eigenvalue.tol",
    "get_eigenvalue_stability": "eigenvalue.stability",
    "get_eigenvalue_gas_boundary_resolution": "eigenvalue.gas_boundary_resolution",
    "get_eigenvalue_layer_name": "eigenvalue.layer_name",
    "get_eigenvalue_layer_num": "eigenvalue.layer_num",
    "get_expert_data_topo_config": "use_data_before_expert_parallelism",
}
"""Function -> the key whose value it reads; where the dict has none, that is the key's default."""

SECTIONS: Final = {
    "get_float16_config": "fp16",
    "get_bfloat16_config": "bf16",
    "get_monitor_config": "",
    "get_timers_config": "timers",
    "get_hybrid_engine_config": "hybrid_engine",
    "get_expert_parallel_config": "expert_parallel",
    "get_compile_config": "compile",
}
"""Function -> the section that it reads, checked as in a file; without a name it is all of them."""


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """The section `zero_optimization`."""
    given = param_dict.get("zero_optimization", {})
    found: DeepSpeedZeroConfig = DeepSpeedZeroConfig(**({"stage": int(given)} if isinstance(given, bool) else given))
    return found


def get_aio_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section `aio`, as a dict."""
    found: dict[str, Any] = load({"aio": param_dict.get("aio", {})}).aio.model_dump()
    return found


def get_checkpoint_params(param_dict: Mapping[str, Any]) -> Any:
    """The section `checkpoint`, as it was given."""
    return param_dict.get("checkpoint", {})


def get_data_types_params(param_dict: Mapping[str, Any]) -> Any:
    """The section `data_types`, as it was given."""
    return param_dict.get("data_types", {})


@cache
def __getattr__(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """A function of one of the two tables."""
    if name in VALUES:
        return _value(name, VALUES[name])
    if name in SECTIONS:
        return _section(name, SECTIONS[name])
    raise AttributeError(name)


def _value(name: str, key: str) -> Callable[[Mapping[str, Any]], Any]:
    def read(param_dict: Mapping[str, Any]) -> Any:
        found: Any = param_dict
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return load({}).at(key)
            found = found[part]
        return found

    return _named(read, name, f"The value of `{key}`, or its default.")


def _section(name: str, key: str) -> Callable[[Mapping[str, Any]], Any]:
    def read(param_dict: Mapping[str, Any]) -> Any:
        if not key:
            return load(dict(param_dict))
        return load({key: param_dict[key]} if key in param_dict else {}).at(key)

    return _named(read, name, f"The section `{key}`." if key else "The configuration as a whole.")


def _named(function: Callable[..., Any], name: str, text: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = text
    return function
