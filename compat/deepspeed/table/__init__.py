"""The table of import paths: which names users import from where, and where those live, or what they wait for.

A row is for one or more modules that have the same names. `theirs=ours` is a name that is called otherwise at home,
`theirs=.` the home itself, and `*` everything in the home's `__all__`. Nothing here imports anything but rows.
Constants that scripts import are in `values/`, a file for each package; a row comes before such a constant.
"""

from typing import Final

from deepspeed.table import comm, data, engine, inference, ops, parallel, start, tools, zero
from deepspeed.table.row import Row

ROWS: Final[tuple[Row, ...]] = (
    *start.ROWS,
    *comm.ROWS,
    *engine.ROWS,
    *zero.ROWS,
    *tools.ROWS,
    *ops.ROWS,
    *parallel.ROWS,
    *inference.ROWS,
    *data.ROWS,
)

CONSTANTS: Final = frozenset(
    Row(
        "autotuning.autotuner autotuning.constants autotuning.scheduler autotuning.tuner.model_based_tuner "
        "checkpoint.constants checkpoint.deepspeed_checkpoint checkpoint.reshape_3d_utils "
        "checkpoint.zero_checkpoint comm.constants comm.torch compression.constants constants datastates.config "
        "elasticity elasticity.constants elasticity.elasticity env_report inference.engine io.base_file_writer "
        "io.constants io.double_io_buffer io.fast_file_writer launcher.constants launcher.launch launcher.runner "
        "module_inject.auto_ep_folding module_inject.fusedqkv_utils module_inject.layers "
        "module_inject.tp_plan_converter module_inject.tp_shard moe.ep_kernels moe.sharded_moe nebula.constants "
        "profiling.constants profiling.flops_profiler.profiler runtime.activation_checkpointing.config "
        "runtime.checkpoint_engine.datastates_checkpoint_engine "
        "runtime.checkpoint_engine.decoupled_checkpoint_engine runtime.checkpoint_engine.torch_checkpoint_engine "
        "runtime.config runtime.constants runtime.data_pipeline.constants runtime.engine "
        "runtime.fp16.fused_optimizer runtime.fp16.loss_scaler runtime.lr_schedules "
        "runtime.model_checkpointing.constants runtime.model_checkpointing.utils runtime.pipe.engine "
        "runtime.precision_config runtime.quantize runtime.state_dict_factory "
        "runtime.superoffload.superoffload_stage3 runtime.swap_tensor runtime.swap_tensor.aio_config "
        "runtime.swap_tensor.async_swapper runtime.swap_tensor.constants runtime.swap_tensor.optimizer_utils "
        "runtime.swap_tensor.partitioned_optimizer_swapper runtime.swap_tensor.pipelined_optimizer_swapper "
        "runtime.swap_tensor.utils runtime.torch_autocast runtime.zenflow.engine_stage3 "
        "runtime.zenflow.zenflow_stage_1_and_2 runtime.zenflow.zenflow_utils runtime.zero.config "
        "runtime.zero.leaf_module_config runtime.zero.muon.original_muon runtime.zero.partition_parameters "
        "runtime.zero.partitioned_param_coordinator runtime.zero.stage3 runtime.zero.stage_1_and_2 utils.config "
        "utils.nvtx utils.timer",
        "",
    ).paths
)
"""Modules with constants in `values/`."""

STARS: Final = {
    "deepspeed.autotuning.autotuner": ("deepspeed.autotuning.constants", "deepspeed.runtime.constants"),
    "deepspeed.autotuning.config": ("deepspeed.autotuning.constants",),
    "deepspeed.checkpoint": ("deepspeed.checkpoint.constants",),
    "deepspeed.checkpoint.deepspeed_checkpoint": ("deepspeed.checkpoint.constants",),
    "deepspeed.comm.comm": ("deepspeed.comm.constants",),
    "deepspeed.comm.config": ("deepspeed.comm.constants",),
    "deepspeed.compression.config": ("deepspeed.compression.constants",),
    "deepspeed.compression.compress": ("deepspeed.compression.constants",),
    "deepspeed.compression.helper": ("deepspeed.compression.constants",),
    "deepspeed.elasticity.config": ("deepspeed.elasticity.constants",),
    "deepspeed.elasticity.elasticity": ("deepspeed.elasticity.constants",),
    "deepspeed.nebula.config": ("deepspeed.nebula.constants",),
    "deepspeed.profiling.config": ("deepspeed.profiling.constants",),
    "deepspeed.runtime.config": (
        "deepspeed.runtime.constants",
        "deepspeed.runtime.data_pipeline.constants",
        "deepspeed.compression.constants",
    ),
    "deepspeed.runtime.data_pipeline.config": ("deepspeed.runtime.data_pipeline.constants",),
    "deepspeed.runtime.model_checkpointing": ("deepspeed.runtime.model_checkpointing.constants",),
    "deepspeed.runtime.swap_tensor.aio_config": ("deepspeed.runtime.swap_tensor.constants",),
}
"""Modules that have all constants of others, too."""

RUNNABLE: Final = {
    "deepspeed.launcher.runner": "deepspeed.faces.commands:deepspeed",
    "deepspeed.launcher.launch": "deepspeed.faces.commands:launch",
    "deepspeed.env_report": "deepspeed.faces.commands:ds_report",
    "deepspeed.checkpoint.ds_to_universal": "deepspeed.faces.commands:ds_to_universal",
    "deepspeed.utils.zero_to_fp32": "deepspeed.faces.zero_to_fp32:main",
}
"""What `python -m` can run."""
