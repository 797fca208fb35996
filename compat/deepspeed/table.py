"""The table of import paths: which names users import from where, and where those live, or what they wait for.

A row is for one or more modules that have the same names. `theirs=ours` is a name that is called otherwise at home,
`theirs=.` the home itself, and `*` everything in the home's `__all__`. Nothing here imports anything.
"""

from typing import Final

OFFLOAD, NVME = "offload", "NVMe storage"
PIPELINE, EXPERTS, SEQUENCE, TENSOR = (
    "pipeline parallelism",
    "mixture of experts",
    "sequence parallelism",
    "tensor parallelism",
)
INFERENCE, HYBRID, ROLLOUT = "inference", "an engine that trains and samples", "an engine that trains and samples"
COMPRESSION, LOW_BITS = "compression of models", "LoRA and quantized weights"
DATA, PROFILER, TUNING = "data efficiency", "the profiler of operations", "autotuning"
ONE_BIT, SPARSE, LAYERS = "compressed communication", "sparse attention", "fused transformer layers"
PASSES, ENGINES = "passes over the graph", "checkpoint engines by hand (an engine saves and loads by itself)"
BY_RANK = "reading checkpoints of DeepSpeed rank by rank (mizzen checkpoint import reads them whole)"


class Row:
    """Names, the modules they are imported from, and their home or the capability that they wait for."""

    __slots__ = ("home", "names", "paths", "waits_for")

    def __init__(self, paths: str, names: str, home: str = "", *, waits_for: str = "") -> None:
        self.paths = tuple(f"deepspeed.{path}" if path != "deepspeed" else path for path in paths.split())
        pairs = (word.partition("=") for word in names.split())
        self.names = {theirs: ours or theirs for theirs, _, ours in pairs}
        self.home = f"deepspeed.faces.{home[1:]}" if home.startswith(".") else home
        self.waits_for = waits_for


ROWS: Final[tuple[Row, ...]] = (
    # The way in
    Row("deepspeed", "initialize add_config_arguments tp_model_init is_compile_supported", ".start"),
    Row("deepspeed", "init_distributed", "mizzen.comm"),
    Row("deepspeed", "add_tuning_arguments", "mizzen.optim.flags"),
    Row("deepspeed runtime.engine", "DeepSpeedEngine", ".engine"),
    Row("deepspeed", "get_accelerator", ".accelerator"),
    Row("deepspeed", "comm=. dist=.", "deepspeed.comm"),
    Row("deepspeed", "domino=.", "deepspeed.runtime.domino"),
    Row("deepspeed", "OnDevice RepeatingLoader", "deepspeed.utils"),
    Row("deepspeed", "logger log_dist", "deepspeed.utils"),
    Row("deepspeed", "DeepSpeedConfig DeepSpeedConfigError", ".config"),
    Row(
        "deepspeed",
        "DeepSpeedOptimizer ZeROOptimizer DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable",
        ".engine_optimizers",
    ),
    Row("deepspeed runtime.dataloader", "DeepSpeedDataLoader", ".loader"),
    Row("deepspeed", "HAS_TRITON", ".facts"),
    Row("deepspeed", "init_inference default_inference_config InferenceEngine", waits_for=INFERENCE),
    Row("deepspeed", "DeepSpeedInferenceConfig", waits_for=INFERENCE),
    Row("deepspeed", "DeepSpeedHybridEngine", waits_for=HYBRID),
    Row("deepspeed", "PipelineEngine PipelineModule", waits_for=PIPELINE),
    Row("deepspeed", "DeepSpeedTransformerLayer DeepSpeedTransformerConfig", waits_for=LAYERS),
    Row("deepspeed", "replace_transformer_layer revert_transformer_layer", waits_for=LAYERS),
    Row("deepspeed", "set_autotp_mode", waits_for=TENSOR),
    Row(
        "git_version_info",
        "version git_hash git_branch installed_ops compatible_ops torch_info accelerator_name",
        ".facts",
    ),
    Row("constants", "TORCH_DISTRIBUTED_DEFAULT_PORT INFERENCE_GENERIC_MODE INFERENCE_SPECIALIZED_MODE", ".facts"),
    # Communication
    Row("comm comm.comm", "*", "mizzen.comm"),
    Row("comm comm.comm", "set_backend", ".tools"),
    Row(
        "comm comm.comm",
        "all_gather_coalesced all_gather_into_tensor all_to_all_single reduce_scatter_tensor configure get_global_rank",
        ".comm",
    ),
    Row("comm comm.comm comm.reduce_op", "ReduceOp", ".comm"),
    Row("comm comm.comm", "P2POp batch_isend_irecv ProcessGroup", "torch.distributed"),
    Row("comm.backend comm.torch", "Backend TorchBackend=Backend", "mizzen.comm"),
    Row(
        "comm.torch",
        "all_gather_comm_off reduce_scatter_comm_off broadcast_comm_off all_reduce_comm_off reduce_comm_off "
        "backward_comm_off",
        ".comm_log",
    ),
    Row("comm.ccl", "CCLBackend", waits_for="oneCCL"),
    Row(
        "comm.utils",
        "get_local_rank_from_launcher get_world_rank_from_launcher get_world_size_from_launcher",
        "mizzen.comm",
    ),
    Row("comm.config", "DeepSpeedCommsConfig=CommsLoggerConfig CommsLoggerConfig", "mizzen.config.observe"),
    Row("comm.constants", "NCCL_BACKEND CCL_BACKEND MPI_BACKEND GLOO_BACKEND HCCL_BACKEND", ".facts"),
    # Accelerators
    Row(
        "accelerator accelerator.real_accelerator",
        "get_accelerator set_accelerator is_current_accelerator_supported DeepSpeedAccelerator",
        ".accelerator",
    ),
    Row("accelerator.abstract_accelerator", "DeepSpeedAccelerator", ".accelerator"),
    Row("accelerator.real_accelerator", "SUPPORTED_ACCELERATOR_LIST", ".accelerator"),
    Row("accelerator.cuda_accelerator", "CUDA_Accelerator", ".accelerator"),
    Row("accelerator.cpu_accelerator", "CPU_Accelerator", ".accelerator"),
    # The engine
    Row("runtime.engine", "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable", ".engine_optimizers"),
    Row("runtime.base_optimizer", "DeepSpeedOptimizer ZeROOptimizer", ".engine_optimizers"),
    Row("runtime", "DeepSpeedOptimizer ZeROOptimizer", ".engine_optimizers"),
    Row("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", ".engine_optimizers"),
    Row("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", ".engine_optimizers"),
    Row("runtime.bf16_optimizer", "BF16_Optimizer", ".engine_optimizers"),
    Row("runtime.fp16.fused_optimizer", "FP16_Optimizer", ".engine_optimizers"),
    Row("runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer", ".engine_optimizers"),
    Row("runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler LossScalerBase CreateLossScaler", ".scaler"),
    Row("runtime.dataloader", "RepeatingLoader", "mizzen.data.repeat"),
    Row("runtime.lr_schedules", "VALID_LR_SCHEDULES", "mizzen.optim.schedules"),
    Row("runtime.lr_schedules", "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR", ".schedules"),
    Row("runtime.lr_schedules", "add_tuning_arguments", "mizzen.optim.flags"),
    Row("runtime.lr_schedules", "LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR", ".facts"),
    Row("runtime.config", "DeepSpeedConfig DeepSpeedConfigError DeepSpeedConfigWriter", ".config"),
    Row("runtime.config_utils", "DeepSpeedConfigModel=Section", "mizzen.config.section"),
    Row("runtime.config_utils", "get_config_default pp_int", ".config"),
    Row(
        "runtime.config",
        "ADAM_OPTIMIZER ADAMW_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER ADAGRAD_OPTIMIZER MUON_OPTIMIZER "
        "DEEPSPEED_OPTIMIZERS",
        ".facts",
    ),
    Row("runtime.model_checkpointing.constants runtime.constants", "ValidationMode", ".config"),
    Row("runtime.constants", "ROUTE_TRAIN ROUTE_EVAL ROUTE_PREDICT ROUTE_ENCODE", ".facts"),
    Row(
        "runtime.constants",
        "TRAIN_BATCH_SIZE TRAIN_MICRO_BATCH_SIZE_PER_GPU GRADIENT_ACCUMULATION_STEPS GRADIENT_CLIPPING",
        ".facts",
    ),
    Row(
        "runtime.utils",
        "see_memory_usage move_to_device copy_to_device set_random_seed clip_grad_norm_ get_global_norm get_grad_norm "
        "required_torch_version ensure_directory_exists noop_decorator empty_cache",
        ".tools",
    ),
    Row("runtime.utils", "partition_uniform partition_balanced PartitionedTensor", waits_for=PIPELINE),
    Row("runtime.compiler", "is_compile_supported", ".start"),
    Row("runtime.compiler", "disable is_compiling", "torch.compiler"),
    Row("runtime.sparse_tensor", "SparseTensor", waits_for="sparse gradients"),
    Row("runtime.progressive_layer_drop", "ProgressiveLayerDrop", waits_for="layer drop by hand"),
    Row("runtime.eigenvalue", "Eigenvalue", waits_for=COMPRESSION),
    Row("runtime.hybrid_engine", "DeepSpeedHybridEngine", waits_for=HYBRID),
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
        "GatheredParameters register_external_parameter unregister_external_parameter",
        "mizzen.zero",
    ),
    Row("zero runtime.zero runtime.zero.parameter_offload", "DeepSpeedZeRoOffload", ".engine_optimizers"),
    Row("zero runtime.zero runtime.zero.mics", "MiCS_Init=Init", ".start"),
    Row("runtime.zero.tiling", "TiledLinear TiledLinearReturnBias", "mizzen.zero"),
    Row("runtime.zero.utils", "is_zero_param", ".parameters"),
    Row("runtime.zero.utils", "ZeRORuntimeException=MizzenError", "mizzen.errors"),
    Row("runtime.zero.config", "DeepSpeedZeroConfig ZeroStageEnum", ".config"),
    Row("runtime.zero.offload_config", "OffloadDeviceEnum OffloadStateTypeEnum", ".config"),
    Row(
        "runtime.zero.offload_config",
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
    Row("runtime.swap_tensor", "AsyncPartitionedParameterSwapper PartitionedOptimizerSwapper", waits_for=NVME),
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
    # Helpers
    Row("utils", "is_initialized", "mizzen.comm"),
    Row("utils", "RepeatingLoader", "mizzen.data.repeat"),
    Row("utils", "clone_tensors_for_torch_save see_memory_usage", ".tools"),
    Row("utils.groups", "*", ".groups"),
    Row("utils utils.logging", "log_dist", "mizzen.log"),
    Row("utils utils.logging", "logger log_dist_once warning_once set_log_level_from_string", ".tools"),
    Row("utils.timer", "SynchronizedWallClockTimer ThroughputTimer", ".tools"),
    Row("utils utils.nvtx", "instrument_w_nvtx", ".tools"),
    Row("utils utils.init_on_device", "OnDevice", "mizzen.zero"),
    Row("utils.debug", "print_rank_0", ".tools"),
    Row("utils.torch", "required_torch_version", ".tools"),
    Row(
        "utils utils.tensor_fragment",
        "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
        "safe_set_full_grad safe_set_full_optimizer_state safe_update_full_grad_vectorized safe_get_local_fp32_param "
        "safe_get_local_grad safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
        "safe_set_local_optimizer_state",
        "mizzen.zero",
    ),
    Row(
        "utils utils.z3_leaf_module",
        "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module set_z3_leaf_module "
        "set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix z3_leaf_parameter",
        "mizzen.zero",
    ),
    Row("utils.zero_to_fp32", "*", ".zero_to_fp32"),
    Row(
        "utils.zero_to_fp32",
        "get_model_state_file get_optim_files get_model_state_files get_checkpoint_files",
        ".folder",
    ),
    Row("utils.comms_logging", "get_caller_func", ".tools"),
    Row("utils.comms_logging", "CommsLogger calc_bw_log", ".comm_log"),
    Row("comm comm.comm", "CommsLogger", ".comm_log"),
    # Checkpoints
    Row("checkpoint.utils", "clone_tensors_for_torch_save", ".tools"),
    Row("checkpoint.ds_to_universal", "main=ds_to_universal", ".commands"),
    Row("checkpoint checkpoint.deepspeed_checkpoint", "DeepSpeedCheckpoint", waits_for=BY_RANK),
    Row("checkpoint checkpoint.zero_checkpoint", "ZeROCheckpoint", waits_for=BY_RANK),
    Row("checkpoint checkpoint.universal_checkpoint", "enable_universal_checkpoint SubparamShape", waits_for=BY_RANK),
    Row("checkpoint", "model_3d_desc get_model_3d_descriptor reshape_meg_2d_parallel", waits_for=BY_RANK),
    # Launching
    Row(
        "launcher.runner",
        "main=deepspeed DEEPSPEED_ENVIRONMENT_NAME DLTS_HOSTFILE PDSH_MAX_FAN_OUT fetch_hostfile "
        "parse_resource_filter parse_inclusion_exclusion encode_world_info",
        ".commands",
    ),
    Row("launcher.launch", "main=launch", ".commands"),
    Row(
        "launcher.multinode_runner",
        "MultiNodeRunner PDSHRunner OpenMPIRunner MPICHRunner IMPIRunner SlurmRunner MVAPICHRunner",
        ".runners",
    ),
    Row(
        "launcher.constants",
        "PDSH_LAUNCHER OPENMPI_LAUNCHER MPICH_LAUNCHER IMPI_LAUNCHER SLURM_LAUNCHER MVAPICH_LAUNCHER",
        ".runners",
    ),
    Row("launcher.constants", "PDSH_MAX_FAN_OUT", ".commands"),
    Row("env_report", "main=ds_report cli_main=ds_report", ".commands"),
    Row("elasticity", "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config", ".config"),
    Row(
        "elasticity.elasticity", "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config", ".config"
    ),
    Row(
        "elasticity elasticity.config",
        "ElasticityError ElasticityConfigError ElasticityIncompatibleWorldSize",
        ".errors",
    ),
    Row("elasticity.config", "ElasticityConfig", "mizzen.config.elasticity"),
    Row(
        "elasticity elasticity.elastic_agent",
        "DSElasticAgent",
        waits_for="agents by hand (mizzen run --elastic_training starts an elastic job)",
    ),
    Row("autotuning autotuning.autotuner", "Autotuner", waits_for=TUNING),
    # Monitoring
    Row("monitor.monitor", "Monitor", "mizzen.monitor.sinks"),
    Row("monitor.monitor", "MonitorMaster", ".config"),
    Row("monitor.config", "DeepSpeedMonitorConfig=Config", "mizzen.config.schema"),
    Row(
        "profiling.flops_profiler profiling.flops_profiler.profiler",
        "FlopsProfiler get_model_profile",
        waits_for=PROFILER,
    ),
    # Operations
    Row("ops", "__compatible_ops__=COMPATIBLE", ".builders"),
    Row("ops.adam ops.adam.fused_adam", "FusedAdam", ".optimizers"),
    Row("ops.adam ops.adam.cpu_adam", "DeepSpeedCPUAdam", ".optimizers"),
    Row("ops.adam ops.adam.zenflow_cpu_adam", "ZenFlowCPUAdam", waits_for=OFFLOAD),
    Row(
        "ops.adam ops.adam.zenflow_torch_adam", "ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3", waits_for=OFFLOAD
    ),
    Row("ops.adagrad ops.adagrad.cpu_adagrad", "DeepSpeedCPUAdagrad", ".optimizers"),
    Row("ops.lamb ops.lamb.fused_lamb", "FusedLamb", ".optimizers"),
    Row("ops.lion ops.lion.fused_lion", "FusedLion", ".optimizers"),
    Row("ops.lion ops.lion.cpu_lion", "DeepSpeedCPULion", ".optimizers"),
    Row("ops.aio", "AsyncIOBuilder", ".builders"),
    Row("ops.gds", "GDSBuilder", ".builders"),
    Row("ops.pin_memory", "PinMemoryBuilder", ".builders"),
    Row("ops.op_builder", "*", ".builders"),
    Row("ops.op_builder.builder", "OpBuilder CUDAOpBuilder", ".builders"),
    Row(
        "ops.op_builder.async_io ops.op_builder.cpu_adagrad ops.op_builder.cpu_adam ops.op_builder.cpu_lion "
        "ops.op_builder.fused_adam ops.op_builder.fused_lamb ops.op_builder.fused_lion ops.op_builder.gds "
        "ops.op_builder.pin_memory ops.op_builder.quantizer ops.op_builder.fp_quantizer ops.op_builder.transformer "
        "ops.op_builder.transformer_inference ops.op_builder.random_ltd ops.op_builder.utils",
        "*",
        ".builders",
    ),
    Row("ops.op_builder.all_ops", "ALL_OPS", ".builders"),
    Row(
        "ops ops.transformer ops.transformer.transformer",
        "DeepSpeedTransformerLayer DeepSpeedTransformerConfig",
        waits_for=LAYERS,
    ),
    Row("ops.transformer", "DeepSpeedTransformerInference DeepSpeedMoEInference", waits_for=INFERENCE),
    Row(
        "ops.sparse_attention",
        "SparseSelfAttention SparsityConfig DenseSparsityConfig FixedSparsityConfig VariableSparsityConfig "
        "BigBirdSparsityConfig BSLongformerSparsityConfig SparseAttentionUtils BertSparseSelfAttention MatMul Softmax",
        waits_for=SPARSE,
    ),
    Row("ops.deepspeed4science", "DS4Sci_EvoformerAttention EvoformerFusedAttention", waits_for=LAYERS),
    Row("ops.fp_quantizer", "FP_Quantize Quantizer matmul_fp8", waits_for=LOW_BITS),
    Row("ops.quantizer", "ds_quantizer", waits_for=LOW_BITS),
    Row("ops.random_ltd", "gpt_sample_tokens bert_sample_tokens GatherTokens ScatterTokens", waits_for=DATA),
    # Not built yet
    Row("pipe runtime.pipe runtime.pipe.module", "PipelineModule LayerSpec TiedLayerSpec", waits_for=PIPELINE),
    Row("pipe runtime.pipe runtime.pipe.topology", "ProcessTopology", waits_for=PIPELINE),
    Row(
        "runtime.pipe.topology",
        "PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid",
        waits_for=PIPELINE,
    ),
    Row("runtime.pipe.engine", "PipelineEngine", waits_for=PIPELINE),
    Row("runtime.pipe.engine runtime.pipe.module", "PipelineError=NotBuilt", "mizzen.errors"),
    Row(
        "runtime.pipe.schedule",
        "PipeSchedule TrainSchedule InferenceSchedule DataParallelSchedule PipeInstruction OptimizerStep ReduceGrads "
        "ReduceTiedGrads LoadMicroBatch ForwardPass BackwardPass SendActivation RecvActivation SendGrad RecvGrad "
        "BufferOpInstruction",
        waits_for=PIPELINE,
    ),
    Row("moe.layer", "MoE", waits_for=EXPERTS),
    Row("moe.experts", "Experts", waits_for=EXPERTS),
    Row("moe.sharded_moe", "TopKGate MOELayer _AllToAll top1gating top2gating topkgating", waits_for=EXPERTS),
    Row("moe.mappings", "gather_tokens drop_tokens", waits_for=EXPERTS),
    Row("moe.utils", "has_moe_layers is_moe_param is_moe_param_group", ".experts"),
    Row(
        "moe.utils",
        "split_params_into_shared_and_expert_params split_params_grads_into_shared_and_expert_params "
        "split_params_into_different_moe_groups_for_optimizer configure_moe_param_groups",
        waits_for=EXPERTS,
    ),
    Row(
        "sequence.layer", "DistributedAttention single_all_to_all uneven_heads_all2all _SeqAllToAll", waits_for=SEQUENCE
    ),
    Row(
        "sequence.cross_entropy",
        "vocab_sequence_parallel_cross_entropy vocab_parallel_cross_entropy",
        waits_for=SEQUENCE,
    ),
    Row("sequence.fpdt_layer", "FPDT_InputConstruct FPDT_Attention FPDT_FFN FPDT_LogitsLoss", waits_for=SEQUENCE),
    Row("sequence sequence.auto_sp", "auto_wrap_model_for_sp", waits_for=SEQUENCE),
    Row(
        "sequence.autosp_fusion sequence.auto_sp",
        "ModalityFusionSPAdapter LlavaFusionAdapter InternVLFusionAdapter Qwen2VLFusionAdapter",
        waits_for=SEQUENCE,
    ),
    Row(
        "runtime.sequence_parallel.ulysses_sp",
        "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter SequenceTiledCompute TiledMLP TiledFusedLogitsLoss "
        "TiledLoss UlyssesSPFwdLossBwdWithLogits sequence_tiled_compute",
        waits_for=SEQUENCE,
    ),
    Row(
        "runtime.sequence_parallel.parallel_state_sp",
        "initialize_sequence_parallel get_sequence_parallel_group get_sequence_parallel_world_size "
        "get_sequence_parallel_rank",
        waits_for=SEQUENCE,
    ),
    Row("runtime.domino.transformer runtime.domino", "DominoTransformer DominoTransformerLayer", waits_for=TENSOR),
    Row("module_inject module_inject.layers", "LinearLayer LinearAllreduce set_autotp_mode", waits_for=TENSOR),
    Row(
        "module_inject module_inject.autotp_config",
        "AutoTPConfig TPLayerSpec PartitionType AutoTPPresets",
        waits_for=TENSOR,
    ),
    Row(
        "module_inject.layers",
        "LmHeadLinearAllreduce SubParamLinearLayer SubParamLinearAllreduce EmbeddingLayer TensorParallel_Layer "
        "GateUpPack_LinearLayer fused_LinearLayer",
        waits_for=TENSOR,
    ),
    Row("module_inject.auto_ep_layer", "AutoEPMoELayer", waits_for=EXPERTS),
    Row("module_inject.auto_tp", "AutoTP ReplaceWithTensorSlicing", waits_for=TENSOR),
    Row(
        "module_inject module_inject.replace_module",
        "replace_transformer_layer revert_transformer_layer",
        waits_for=LAYERS,
    ),
    Row("module_inject module_inject.replace_policy", "HFBertLayerPolicy DSPolicy", waits_for=INFERENCE),
    Row("inference inference.engine", "InferenceEngine", waits_for=INFERENCE),
    Row("inference inference.config", "DeepSpeedInferenceConfig", waits_for=INFERENCE),
    Row(
        "inference.quantization inference.quantization.quantization",
        "_init_group_wise_weight_quantization",
        waits_for=INFERENCE,
    ),
    Row("inference inference.v2 inference.v2.engine_v2", "InferenceEngineV2", waits_for=INFERENCE),
    Row("inference.v2.scheduling_utils", "SchedulingResult", ".facts"),
    Row("inference.v2.scheduling_utils", "SchedulingError", waits_for=INFERENCE),
    Row(
        "inference inference.v2",
        "RaggedInferenceEngineConfig build_hf_engine build_engine_from_ds_checkpoint",
        waits_for=INFERENCE,
    ),
    Row("linear", "OptimizedLinear LoRAConfig QuantizationConfig Init init_lora", waits_for=LOW_BITS),
    Row("linear.config", "LoRAConfig QuantizationConfig", waits_for=LOW_BITS),
    Row("linear.optimized_linear", "OptimizedLinear LoRAOptimizedLinear", waits_for=LOW_BITS),
    Row("linear.quantization", "QuantizedParameter QuantizedLinear", waits_for=LOW_BITS),
    Row(
        "compression compression.compress",
        "init_compression redundancy_clean student_initialization",
        waits_for=COMPRESSION,
    ),
    Row("compression.scheduler", "compression_scheduler", waits_for=COMPRESSION),
    Row("compression.helper utils.module_utils", "recursive_getattr recursive_setattr", ".tools"),
    Row("compression.helper", "convert_conv1d_to_linear", waits_for=COMPRESSION),
    Row("runtime.data_pipeline.data_sampling.data_analyzer", "DataAnalyzer DistributedDataAnalyzer", waits_for=DATA),
    Row("runtime.data_pipeline.data_sampling.data_sampler", "DeepSpeedDataSampler", waits_for=DATA),
    Row(
        "runtime.data_pipeline.data_sampling.indexed_dataset",
        "MMapIndexedDataset MMapIndexedDatasetBuilder",
        waits_for=DATA,
    ),
    Row(
        "runtime.data_pipeline.data_sampling.variable_batch_size_and_lr",
        "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed batch_by_seqlens",
        waits_for=DATA,
    ),
    Row("runtime.data_pipeline.data_routing.helper", "convert_to_random_ltd save_without_random_ltd", waits_for=DATA),
    Row("runtime.data_pipeline.data_routing.basic_layer", "RandomLayerTokenDrop", waits_for=DATA),
    Row("runtime.data_pipeline.curriculum_scheduler", "CurriculumScheduler", waits_for=DATA),
    Row("io", "FastFileWriter FastFileWriterConfig MockFileWriter PyFileWriter", waits_for=NVME),
    Row("nvme", "ds_io_main sweep_main", waits_for=NVME),
    Row("compile", "init_z1 init_z3", waits_for=PASSES),
)

RUNNABLE: Final = {
    "deepspeed.launcher.runner": "deepspeed.faces.commands:deepspeed",
    "deepspeed.launcher.launch": "deepspeed.faces.commands:launch",
    "deepspeed.env_report": "deepspeed.faces.commands:ds_report",
    "deepspeed.checkpoint.ds_to_universal": "deepspeed.faces.commands:ds_to_universal",
    "deepspeed.utils.zero_to_fp32": "deepspeed.faces.zero_to_fp32:main",
}
"""What `python -m` can run."""
