"""Inference, weights of few bits, compression."""

from typing import Final

from deepspeed.table.row import COMPRESSION, INFERENCE, LOW_BITS, MODULE, Row

ROWS: Final[tuple[Row, ...]] = (
    Row("inference inference.engine deepspeed", "InferenceEngine", waits_for=INFERENCE, base=MODULE),
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
    Row("compression", "compression_scheduler convert_conv1d_to_linear", waits_for=COMPRESSION),
    Row(
        "compression.basic_layer",
        "QuantAct Embedding_Compress LinearLayer_Compress Conv2dLayer_Compress BNLayer_Compress "
        "split_tensor_along_last_dim copy_to_model_parallel_region reduce_from_model_parallel_region "
        "scatter_to_model_parallel_region gather_from_model_parallel_region ColumnParallelLinear_Compress "
        "RowParallelLinear_Compress",
        waits_for=COMPRESSION,
    ),
    Row("compression.compress", "check_deepspeed_config get_module_name get_compress_methods", waits_for=COMPRESSION),
    Row(
        "compression.config",
        "get_compression_config get_layer_reduction get_layer_reduction_enabled get_layer_reduction_params "
        "get_quantize_enabled get_weight_quantization get_weight_quantization_shared_parameters "
        "get_weight_quantization_different_groups get_activation_quantization "
        "get_activation_quantization_shared_parameters get_activation_quantization_different_groups "
        "get_sparse_pruning get_sparse_pruning_shared_parameters get_sparse_pruning_different_groups "
        "get_row_pruning get_row_pruning_shared_parameters get_row_pruning_different_groups get_head_pruning "
        "get_head_pruning_shared_parameters get_head_pruning_different_groups get_channel_pruning "
        "get_channel_pruning_shared_parameters get_channel_pruning_different_groups",
        waits_for=COMPRESSION,
    ),
    Row(
        "compression.helper",
        "module_replacement is_module_compressible compression_preparation fix_compression generate_pruners "
        "register_on_step_begin rewrite_optimizer_step",
        waits_for=COMPRESSION,
    ),
    Row(
        "compression.utils",
        "TopKBinarizer SymQuantizer AsymQuantizer TernaryQuantizer BinaryQuantizer",
        waits_for=COMPRESSION,
    ),
    Row("inference", "DeepSpeedTPConfig", waits_for=INFERENCE),
    Row(
        "inference.config",
        "DtypeEnum MoETypeEnum DeepSpeedTPConfig DeepSpeedMoEConfig QuantTypeEnum BaseQuantConfig "
        "WeightQuantConfig ActivationQuantConfig QKVQuantConfig QuantizationConfig InferenceCheckpointConfig",
        waits_for=INFERENCE,
    ),
    Row(
        "inference.quantization.layers",
        "get_quantized_weight_wrapper get_quantize_weight_fn QuantizedLinear QuantizedEmbedding",
        waits_for=INFERENCE,
    ),
    Row("inference.quantization.quantization_context", "QuantizationContext", waits_for=INFERENCE),
    Row(
        "inference.quantization.utils",
        "get_quantizer_module tensor_clamp tensor_round Quantizer DeQuantizer "
        "get_AsyncPartitionedParameterSwapper "
        "recursive_setattr concat_to_compat_param wrap_quantized_functional wrap_load_from_state_dict",
        waits_for=INFERENCE,
    ),
    Row("linear.context_manager", "init_lora Init", waits_for=LOW_BITS),
    Row("runtime.quantize", "Quantizer", waits_for=COMPRESSION),
    Row("runtime.weight_quantizer", "WeightQuantization", waits_for=INFERENCE),
)
