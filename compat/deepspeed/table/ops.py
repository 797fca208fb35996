"""Operations and their builders."""

from typing import Final

from deepspeed.table.row import DATA, INFERENCE, LAYERS, LOW_BITS, SPARSE, ZENFLOW, Row

ROWS: Final[tuple[Row, ...]] = (
    Row("ops", "__compatible_ops__=COMPATIBLE", ".builders"),
    Row("ops.adam ops.adam.fused_adam", "FusedAdam", ".optimizers"),
    Row("ops.adam ops.adam.cpu_adam", "DeepSpeedCPUAdam", ".optimizers"),
    Row("ops.adam ops.adam.zenflow_cpu_adam", "ZenFlowCPUAdam", ".optimizers"),
    Row(
        "ops.adam ops.adam.zenflow_torch_adam", "ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3", waits_for=ZENFLOW
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
        "ops.op_builder.pin_memory ops.op_builder.quantizer ops.op_builder.fp_quantizer "
        "ops.op_builder.transformer "
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
        "BigBirdSparsityConfig BSLongformerSparsityConfig SparseAttentionUtils BertSparseSelfAttention MatMul "
        "Softmax",
        waits_for=SPARSE,
    ),
    Row("ops.deepspeed4science", "DS4Sci_EvoformerAttention EvoformerFusedAttention", waits_for=LAYERS),
    Row("ops.fp_quantizer", "FP_Quantize Quantizer matmul_fp8", waits_for=LOW_BITS),
    Row("ops.quantizer", "ds_quantizer", waits_for=LOW_BITS),
    Row("ops.random_ltd", "gpt_sample_tokens bert_sample_tokens GatherTokens ScatterTokens", waits_for=DATA),
    Row("ops.adam.zenflow_torch_adam", "adamw", waits_for=ZENFLOW),
    Row(
        "ops.deepspeed4science.evoformer_attn",
        "attention_bwd EvoformerFusedAttention DS4Sci_EvoformerAttention",
        waits_for=LAYERS,
    ),
    Row("ops.fp_quantizer.fp8_gemm", "matmul_fp8 matmul_fp8_fallback", waits_for=LOW_BITS),
    Row(
        "ops.fp_quantizer.fp8_gemm_triton",
        "matmul_kernel_fp8_bf16 matmul_kernel_fp8_fp16 matmul_fp8_triton",
        waits_for=LOW_BITS,
    ),
    Row("ops.fp_quantizer.quantize", "Quantizer FP_Quantize", waits_for=LOW_BITS),
    Row("ops.quantizer.quantizer", "ds_quantizer", waits_for=LOW_BITS),
    Row(
        "ops.random_ltd.dropping_utils",
        "gpt_sample_tokens bert_sample_tokens GatherTokens ScatterTokens",
        waits_for=DATA,
    ),
    Row("ops.sparse_attention", "LocalSlidingWindowSparsityConfig", waits_for=SPARSE),
    Row("ops.sparse_attention.bert_sparse_self_attention", "BertSparseSelfAttention", waits_for=SPARSE),
    Row("ops.sparse_attention.matmul", "MatMul", waits_for=SPARSE),
    Row("ops.sparse_attention.softmax", "next_power_of_2 num_warps Softmax", waits_for=SPARSE),
    Row("ops.sparse_attention.sparse_attention_utils", "SparseAttentionUtils", waits_for=SPARSE),
    Row("ops.sparse_attention.sparse_self_attention", "SparseSelfAttention", waits_for=SPARSE),
    Row(
        "ops.sparse_attention.sparsity_config",
        "SparsityConfig DenseSparsityConfig FixedSparsityConfig VariableSparsityConfig BigBirdSparsityConfig "
        "BSLongformerSparsityConfig LocalSlidingWindowSparsityConfig",
        waits_for=SPARSE,
    ),
    Row("ops.transformer", "DeepSpeedInferenceConfig DeepSpeedMoEInferenceConfig", waits_for=LAYERS),
    Row("ops.transformer.transformer", "TransformerConfig DeepSpeedTransformerFunction", waits_for=LAYERS),
)
