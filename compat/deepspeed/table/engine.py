"""Engines, their optimizers, schedules, configuration and loaders."""

from typing import Final

from deepspeed.table.row import COMPRESSION, ENGINE, ENGINES, HYBRID, ONE_BIT, PIPELINE, ROLLOUT, Row

ROWS: Final[tuple[Row, ...]] = (
    Row("runtime.engine", "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable", ".engine_optimizers"),
    Row("runtime.base_optimizer", "DeepSpeedOptimizer ZeROOptimizer", ".engine_optimizers"),
    Row("runtime", "DeepSpeedOptimizer ZeROOptimizer", ".engine_optimizers"),
    Row("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", ".engine_optimizers"),
    Row("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", ".engine_optimizers"),
    Row("runtime.bf16_optimizer", "BF16_Optimizer", ".engine_optimizers"),
    Row("runtime.fp16.fused_optimizer", "FP16_Optimizer", ".engine_optimizers"),
    Row("runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer", ".engine_optimizers"),
    Row("runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler LossScalerBase CreateLossScaler", ".scaler"),
    Row("runtime.dataloader", "RepeatingLoader", "mizzen.data.loader"),
    Row("runtime.lr_schedules", "VALID_LR_SCHEDULES", "mizzen.optim.schedules"),
    Row("runtime.lr_schedules", "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR", ".schedules"),
    Row("runtime.lr_schedules", "add_tuning_arguments", "mizzen.optim.schedules"),
    Row(
        "runtime.lr_schedules",
        "parse_arguments get_config_from_args get_lr_from_config override_params override_lr_range_test_params "
        "override_1cycle_params override_warmupLR_params",
        ".arguments",
    ),
    Row(
        "runtime.torch_autocast",
        "LOWER_PRECISION_SAFE_MODULES get_default_autocast_lower_precision_modules has_comm_dtype get_comm_dtype "
        "get_all_comm_dtypes sort_dtypes autocast_if_enabled",
        ".autocast",
    ),
    Row(
        "runtime.precision_config",
        "DeepSpeedFP16Config=Fp16Config DeepSpeedBF16Config=Bf16Config",
        "mizzen.config.execution",
    ),
    Row("runtime.precision_config", "get_float16_config get_bfloat16_config", ".readers"),
    Row(
        "runtime.config",
        "get_train_batch_size get_train_micro_batch_size_per_gpu get_gradient_accumulation_steps "
        "get_managed_gradient_accumulation get_gradient_clipping get_gradient_predivide_factor "
        "get_gradient_allreduce_op get_prescale_gradients get_sparse_gradients_enabled "
        "get_communication_data_type get_steps_per_print get_disable_allgather get_dump_state "
        "get_graph_harvesting get_wall_clock_breakdown get_memory_breakdown get_log_level "
        "get_dataloader_drop_last get_optimizer_name get_optimizer_params get_optimizer_legacy_fusion "
        "get_scheduler_name get_scheduler_params get_zero_allow_untested_optimizer "
        "get_zero_force_ds_cpu_optimizer get_pld_enabled get_amp_enabled get_torch_autocast_enabled "
        "get_torch_autocast_dtype get_lower_precision_safe_modules get_eigenvalue_enabled get_eigenvalue_verbose "
        "get_eigenvalue_max_iter get_eigenvalue_tol get_eigenvalue_stability "
        "get_eigenvalue_gas_boundary_resolution get_eigenvalue_layer_name get_eigenvalue_layer_num "
        "get_expert_data_topo_config get_hybrid_engine_config get_expert_parallel_config get_checkpoint_params "
        "get_data_types_params",
        ".readers",
    ),
    Row("runtime.config", "HybridEngineConfig", "mizzen.config.execution"),
    Row("compile.config", "CompileConfig", "mizzen.config.execution"),
    Row(
        "runtime.activation_checkpointing.config",
        "DeepSpeedActivationCheckpointingConfig=ActivationCheckpointingConfig",
        "mizzen.config.execution",
    ),
    Row("nebula.config", "DeepSpeedNebulaConfig=NebulaConfig", "mizzen.config.checkpoint"),
    Row("autotuning.config", "DeepSpeedAutotuningConfig=AutotuningConfig", "mizzen.config.execution"),
    Row("runtime.swap_tensor.aio_config", "get_aio_config", ".readers"),
    Row("runtime.config", "DeepSpeedConfig DeepSpeedConfigError DeepSpeedConfigWriter", ".config"),
    Row("runtime.config_utils", "DeepSpeedConfigModel=Section", "mizzen.config.section"),
    Row("runtime.config_utils", "get_config_default pp_int", ".config"),
    Row(
        "runtime.config",
        "DEEPSPEED_OPTIMIZERS",
        ".facts",
    ),
    Row("runtime.model_checkpointing.constants runtime.constants", "ValidationMode", ".config"),
    Row(
        "runtime.utils",
        "see_memory_usage move_to_device copy_to_device set_random_seed clip_grad_norm_ get_global_norm "
        "get_grad_norm "
        "required_torch_version ensure_directory_exists noop_decorator empty_cache",
        ".tools",
    ),
    Row("runtime.utils", "partition_uniform partition_balanced", ".tools"),
    Row("runtime.utils", "PartitionedTensor", waits_for=PIPELINE),
    Row("runtime.compiler", "is_compile_supported", ".start"),
    Row("runtime.compiler", "disable is_compiling", "torch.compiler"),
    Row("runtime.sparse_tensor", "SparseTensor", waits_for="sparse gradients"),
    Row("runtime.progressive_layer_drop", "ProgressiveLayerDrop", waits_for="layer drop by hand"),
    Row("runtime.eigenvalue", "Eigenvalue", waits_for=COMPRESSION),
    Row("runtime.hybrid_engine deepspeed", "DeepSpeedHybridEngine", waits_for=HYBRID, base=ENGINE),
    Row(
        "runtime.rollout",
        "RolloutBatch RolloutConfig RolloutEngine RolloutRequest SamplingConfig build_rollout",
        waits_for=ROLLOUT,
    ),
    Row("runtime.fp16.onebit runtime.fp16.onebit.adam", "OnebitAdam", waits_for=ONE_BIT),
    Row("runtime.fp16.onebit runtime.fp16.onebit.lamb", "OnebitLamb", waits_for=ONE_BIT),
    Row("runtime.fp16.onebit runtime.fp16.onebit.zoadam", "ZeroOneAdam", waits_for=ONE_BIT),
    Row(
        "runtime.comm.coalesced_collectives",
        "reduce_scatter_coalesced all_to_all_quant_reduce all_to_all_loco_quant_reduce",
        waits_for="quantized collectives outside of an engine",
    ),
    Row("runtime.comm.nccl", "NcclBackend", waits_for=ONE_BIT),
    Row("runtime.comm.mpi", "MpiBackend", waits_for=ONE_BIT),
    Row("runtime.comm.hccl", "HcclBackend", waits_for=ONE_BIT),
    Row("runtime.comm.compressed", "CompressedBackend", waits_for=ONE_BIT),
    Row(
        "runtime.checkpoint_engine runtime.checkpoint_engine.checkpoint_engine",
        "CheckpointEngine CheckpointCommitInfo",
        waits_for=ENGINES,
    ),
    Row(
        "runtime.checkpoint_engine runtime.checkpoint_engine.torch_checkpoint_engine",
        "TorchCheckpointEngine",
        waits_for=ENGINES,
    ),
    Row(
        "runtime.checkpoint_engine",
        "FastCheckpointEngine DecoupledCheckpointEngine DataStatesCheckpointEngine create_checkpoint_engine",
        waits_for=ENGINES,
    ),
    Row("runtime.checkpoint_engine.datastates_checkpoint_engine", "DataStatesCheckpointEngine", waits_for=ENGINES),
    Row(
        "runtime.checkpoint_engine.decoupled_checkpoint_engine",
        "DecoupledEvent CheckpointSize init_decoupled_checkpoint DecoupledCheckpointEngine",
        waits_for=ENGINES,
    ),
    Row("runtime.checkpoint_engine.fast_checkpoint_engine", "FastCheckpointEngine", waits_for=ENGINES),
    Row("runtime.checkpoint_engine.nebula_checkpoint_engine", "NebulaCheckpointEngine", waits_for=ENGINES),
    Row("runtime.checkpoint_engine.utils", "create_checkpoint_engine", waits_for=ENGINES),
    Row("runtime.comm.utils", "check_and_handle_empty_buffer", waits_for=ONE_BIT),
    Row("runtime.compression.cupy", "CupyBackend", waits_for=ONE_BIT),
    Row(
        "runtime.hybrid_engine_graph",
        "DecodeGraphCache decode_steps_from_generate_kwargs validate_cuda_graph_support",
        waits_for=HYBRID,
    ),
    Row("runtime.rollout", "HybridEngineRollout", waits_for=ROLLOUT),
    Row(
        "runtime.rollout.base",
        "RolloutConfig SamplingConfig RolloutRequest RolloutBatch RolloutEngine",
        waits_for=ROLLOUT,
    ),
    Row("runtime.rollout.hybrid_engine_rollout", "HybridEngineRolloutConfig HybridEngineRollout", waits_for=ROLLOUT),
)
