"""ZeRO and activation checkpointing."""

from typing import Final

from deepspeed.table.row import OFFLOAD, ZENFLOW, Row

ROWS: Final[tuple[Row, ...]] = (
    # ZeRO
    Row("zero runtime.zero", "*", "mizzen.zero"),
    Row("zero runtime.zero runtime.zero.partition_parameters", "Init", ".start"),
    Row(
        "zero runtime.zero runtime.zero.partition_parameters",
        "ZeroParamStatus ZeroParamType DeepSpeedTensorOverride",
        ".parameters",
    ),
    Row(
        "runtime.zero.partition_parameters",
        "register_external_parameter unregister_external_parameter",
        "mizzen.zero",
    ),
    Row("zero runtime.zero runtime.zero.parameter_offload", "DeepSpeedZeRoOffload", ".engine_optimizers"),
    Row("zero runtime.zero runtime.zero.mics", "MiCS_Init=Init", ".start"),
    Row("runtime.zero.tiling", "TiledLinear TiledLinearReturnBias", "mizzen.zero"),
    Row("runtime.zero.utils", "is_zero_param", ".parameters"),
    Row("runtime.zero.utils", "ZeRORuntimeException=MizzenError", "mizzen.errors"),
    Row("runtime.zero.config", "DeepSpeedZeroConfig ZeroStageEnum OffloadDeviceEnum", ".config"),
    Row("runtime.zero.config", "get_zero_config", ".readers"),
    Row("runtime.zero.config", "ZenFlowConfig DeepSpeedZeroLeafModuleConfig=LeafModuleConfig", "mizzen.config.zero"),
    Row("zero runtime.zero runtime.zero.partition_parameters", "GatheredParameters", ".parameters"),
    Row("runtime.zero.offload_config", "OffloadDeviceEnum OffloadStateTypeEnum", ".config"),
    Row(
        "runtime.zero.offload_config runtime.zero.config",
        "DeepSpeedZeroOffloadParamConfig=OffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig=OffloadOptimizerConfig",
        "mizzen.config.zero",
    ),
    Row("runtime.zero.stage3", "unwrap_model_for_generation", "mizzen.zero"),
    Row(
        "runtime.zero.stage3",
        "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_live "
        "estimate_zero3_model_states_mem_needs_all_cold",
        ".estimate",
    ),
    Row(
        "runtime.zero.stage_1_and_2",
        "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_live "
        "estimate_zero2_model_states_mem_needs_all_cold",
        ".estimate",
    ),
    Row("runtime.zero.muon.muon_optimizer runtime.zero.muon.original_muon", "MuonWithAuxAdam", ".optimizers"),
    Row("runtime.zero.offload_states", "offload_optimizer_states reload_optimizer_states", waits_for=OFFLOAD),
    Row("runtime.swap_tensor", "AsyncPartitionedParameterSwapper PartitionedOptimizerSwapper", waits_for=OFFLOAD),
    Row("runtime.zenflow runtime.zenflow.zenflow_config", "ZenFlowConfig", "mizzen.config.zero"),
    Row("runtime.zero.leaf_module_config", "DeepSpeedZeroLeafModuleConfig=LeafModuleConfig", "mizzen.config.zero"),
    Row("runtime.superoffload", "SuperOffloadOptimizer_Stage3", waits_for=OFFLOAD),
    # Activation checkpointing
    Row("checkpointing runtime.activation_checkpointing.checkpointing", "*", "mizzen.checkpointing"),
    Row(
        "checkpointing runtime.activation_checkpointing.checkpointing",
        "CheckpointFunction get_checkpoint_hidden_states_offloading_ctx_manager",
        waits_for=OFFLOAD,
    ),
    Row(
        "runtime.activation_checkpointing.offload_activations",
        "CheckpointActivationOffloadStats patch_gradient_checkpointing_layer_marker "
        "CheckpointHiddenStatesOffload "
        "get_checkpoint_hidden_states_offloading_ctx_manager",
        waits_for=OFFLOAD,
    ),
    Row("runtime.superoffload.superoffload_stage3", "SuperOffloadOptimizer_Stage3", waits_for=OFFLOAD),
    Row(
        "runtime.superoffload.superoffload_utils",
        "TaskKeys ResultKeys EventTypes superoffload_optimizer_worker SuperOffloadCPUOptimizer",
        waits_for=OFFLOAD,
    ),
    Row("runtime.swap_tensor.async_swapper", "AsyncTensorSwapper", waits_for=OFFLOAD),
    Row(
        "runtime.swap_tensor.optimizer_utils",
        "FlattenedTensorSwapInfo SwapTensorContext OptimizerStateSwapInfo OptimizerSwapper",
        waits_for=OFFLOAD,
    ),
    Row("runtime.swap_tensor.partitioned_optimizer_swapper", "PartitionedOptimizerSwapper", waits_for=OFFLOAD),
    Row(
        "runtime.swap_tensor.partitioned_param_swapper",
        "PartitionedParamStatus AsyncPartitionedParameterSwapper",
        waits_for=OFFLOAD,
    ),
    Row(
        "runtime.swap_tensor.pipelined_optimizer_swapper",
        "OptimizerSwapOp PipelinedOptimizerSwapper",
        waits_for=OFFLOAD,
    ),
    Row(
        "runtime.swap_tensor.utils",
        "swap_in_tensors swap_out_tensors print_object SwapBuffer SwapBufferPool SwapBufferManager "
        "get_sized_buffer get_sized_buffers",
        waits_for=OFFLOAD,
    ),
    Row(
        "runtime.zenflow.engine",
        "configure_zenflow is_zenflow_update_boundary zenflow_step sync_zenflow_optimizer_lr",
        waits_for=ZENFLOW,
    ),
    Row(
        "runtime.zenflow.engine_stage3",
        "configure_zenflow zenflow_cpu_optimizer_step selective_optimizer_step is_zenflow_select_boundary "
        "update_selected_channels sync_fp32_param_from_gpu zenflow_backward_prologue zenflow_backward_epilogue "
        "log_selective_optimizer_timers initialize_optimizer_states get_overlap_step_state partition_grads "
        "unscale_and_clip_grads zenflow_cpu_optimizer_overlap_step wait_last_update_and_copy step",
        waits_for=ZENFLOW,
    ),
    Row(
        "runtime.zenflow.zenflow_stage_1_and_2",
        "ZenFlowZeroOptimizer ZenFlowZeroOptimizerSequential ZenFlowZeroOptimizerParallel",
        ".engine_optimizers",
    ),
    Row(
        "runtime.zenflow.zenflow_utils",
        "disable_accelerator all_tensors_equal zenflow_optimizer_process start_optimizer_process",
        waits_for=ZENFLOW,
    ),
    Row("runtime.zero.offload_states", "get_state_devices", ".parameters"),
    Row("runtime.zero.offload_states", "offload_adam_states reload_adam_states", waits_for=OFFLOAD),
)
