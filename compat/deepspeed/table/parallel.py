"""Pipelines, experts, sequences and tensors over ranks."""

from typing import Final

from deepspeed.table.row import EXPERTS, INFERENCE, LAYERS, MODULE, SEQUENCE, TENSOR, Row

POLICIES: Final = {
    "bloom": "BLOOMLayerPolicy",
    "clip": "HFCLIPLayerPolicy",
    "distil_bert": "HFDistilBertLayerPolicy",
    "gpt2": "HFGPT2LayerPolicy",
    "gptj": "HFGPTJLayerPolicy",
    "gptneo": "HFGPTNEOLayerPolicy",
    "gptneox": "GPTNEOXLayerPolicy",
    "internlm": "InternLMLayerPolicy",
    "llama": "LLAMALayerPolicy",
    "llama2": "LLAMA2LayerPolicy",
    "megatron_gpt": "MegatronLayerPolicy",
    "megatron_gpt_moe": "MegatronMoELayerPolicy",
    "opt": "HFOPTLayerPolicy",
    "unet": "UNetPolicy",
    "vae": "VAEPolicy",
}
"""Modules of containers, and the class of each that programs name in an injection_policy."""
ROWS: Final[tuple[Row, ...]] = (
    Row("pipe runtime.pipe runtime.pipe.module deepspeed", "PipelineModule", "mizzen.pipe"),
    Row("pipe runtime.pipe runtime.pipe.module", "LayerSpec TiedLayerSpec", "mizzen.pipe"),
    Row("pipe runtime.pipe runtime.pipe.topology", "ProcessTopology", "mizzen.config.topology"),
    Row("runtime.pipe.topology", "PipeDataParallelTopology PipeModelDataParallelTopology", "mizzen.config.topology"),
    Row("runtime.pipe.topology", "PipelineParallelGrid", "mizzen.comm.grid"),
    Row("runtime.pipe.engine deepspeed", "PipelineEngine=DeepSpeedEngine", ".engine"),
    Row("runtime.pipe.engine runtime.pipe.module", "PipelineError=UsageError", "mizzen.errors"),
    Row("runtime.pipe.engine", "is_even", ".pipe_messages"),
    Row("runtime.pipe.p2p", "can_send_recv init_process_groups send recv wait send_obj recv_obj", ".pipe_messages"),
    Row(
        "runtime.pipe.schedule",
        "PipeSchedule TrainSchedule InferenceSchedule DataParallelSchedule PipeInstruction OptimizerStep "
        "ReduceGrads "
        "ReduceTiedGrads LoadMicroBatch ForwardPass BackwardPass SendActivation RecvActivation SendGrad RecvGrad "
        "BufferOpInstruction",
        ".pipe_schedules",
    ),
    Row("moe.layer", "MoE", waits_for=EXPERTS, base=MODULE),
    Row("moe.experts", "Experts", waits_for=EXPERTS, base=MODULE),
    Row("moe.sharded_moe", "TopKGate MOELayer", waits_for=EXPERTS, base=MODULE),
    Row("moe.sharded_moe", "_AllToAll top1gating top2gating topkgating", waits_for=EXPERTS),
    Row("moe.mappings", "gather_tokens drop_tokens", waits_for=EXPERTS),
    Row("sequence.layer", "DistributedAttention", waits_for=SEQUENCE, base=MODULE),
    Row(
        "moe.utils",
        "has_moe_layers is_moe_param is_moe_param_group split_params_into_shared_and_expert_params "
        "split_params_grads_into_shared_and_expert_params split_params_into_different_moe_groups_for_optimizer "
        "configure_moe_param_groups",
        ".experts",
    ),
    Row("moe.sharded_moe", "TUTEL_INSTALLED", ".facts"),
    Row("sequence.layer", "single_all_to_all uneven_heads_all2all _SeqAllToAll", waits_for=SEQUENCE),
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
    Row(
        "module_inject module_inject.layers",
        "LinearLayer LinearAllreduce SubParamLinearLayer SubParamLinearAllreduce set_autotp_mode",
        ".tensor",
    ),
    Row(
        "module_inject.layers",
        "LmHeadLinearAllreduce GateUpPack_LinearLayer TensorParallel_Layer RowParallel ColumnParallel "
        "get_auto_tp_mode is_autotp_training_mode fused_LinearLayer AsyncColumnParallel "
        "GatherFromTensorParallelRegion add_bias configure_tensor_parallel_runtime GatherReplacedLayerParams "
        "FusedModuleWrapper RMSNormalize",
        ".tensor",
    ),
    Row("module_inject module_inject.layers", "EmbeddingLayer Normalize", ".tensor"),
    Row(
        "module_inject.fusedqkv_utils",
        "get_fused_qkv_type require_tp_fused_qkvw split_by_qkvlist_and_refuse",
        ".tensor",
    ),
    Row("runtime.tensor_parallel runtime.tensor_parallel.config", "AUTOTP_MODE", ".tensor"),
    Row(
        "module_inject module_inject.autotp_config",
        "AutoTPConfig TPLayerSpec PartitionType AutoTPPresets merge_autotp_configs",
        ".autotp",
    ),
    Row("module_inject.auto_tp", "AutoTP move", ".autotp"),
    Row("module_inject.tp_plan_converter", "TPPlanConverter", ".autotp"),
    Row("runtime.tensor_parallel runtime.tensor_parallel.config", "get_tensor_parallel_config", ".autotp"),
    Row("runtime.tensor_parallel runtime.tensor_parallel.tp_manager", "TpTrainingManager", ".autotp"),
    Row(
        "runtime.tensor_parallel.config",
        "TPConfig=TensorParallelSizeConfig TPTrainingConfig=TensorParallelConfig",
        "mizzen.config.parallel",
    ),
    Row("runtime.tensor_parallel.init_utils", "load_ds_config infer_config_dtype tp_group_world_size", ".autotp"),
    Row("module_inject.auto_ep_layer", "AutoEPMoELayer", waits_for=EXPERTS),
    Row("module_inject.auto_tp", "ReplaceWithTensorSlicing", waits_for=TENSOR),
    Row(
        "module_inject module_inject.replace_module",
        "replace_transformer_layer revert_transformer_layer",
        waits_for=LAYERS,
    ),
    Row("module_inject module_inject.replace_policy", "DSPolicy", waits_for=INFERENCE),
    Row(
        "module_inject module_inject.replace_policy module_inject.containers module_inject.containers.bert",
        "HFBertLayerPolicy",
        waits_for=INFERENCE,
    ),
    *(
        Row(
            f"module_inject.containers.{module} module_inject.containers module_inject.replace_policy",
            policies,
            waits_for=INFERENCE,
        )
        for module, policies in POLICIES.items()
    ),
    Row(
        "module_inject",
        "ReplaceWithTensorSlicing GroupQuantizer generic_injection quantize_transformer_layer",
        waits_for=TENSOR,
    ),
    Row("module_inject.auto_ep", "AutoEP", waits_for=EXPERTS),
    Row(
        "module_inject.auto_ep_config",
        "parse_autoep_config validate_autoep_config validate_autoep_post_detection fill_autoep_config_from_hf",
        waits_for=EXPERTS,
    ),
    Row(
        "module_inject.auto_ep_folding",
        "ParallelFoldingSpec FoldingGroupTables FoldingGroupHandles build_folding_spec "
        "expected_folding_group_tables local_folding_ranks validate_folding_global "
        "mark_autoep_folding_router_parameter mark_autoep_folding_partial_router_parameter "
        "mark_autoep_folding_sp_sharded_layernorm_parameter autoep_folding_gradient_reduction_strategy "
        "reduce_autoep_folding_gradient is_autoep_folding_gradient_corrected "
        "clear_autoep_folding_gradient_corrected apply_folding_correction_to_grad_buffer "
        "assert_group_matches_spec",
        waits_for=EXPERTS,
    ),
    Row(
        "module_inject.auto_ep_layer",
        "RouterOutput SplitPlan resolve_score_apply_mode resolve_combine_impl "
        "apply_scores_before_experts_if_enabled compute_split_plan compute_split_plan_from_expert_indices "
        "permute_by_local_expert unpermute_by_local_expert combine_from_routed",
        waits_for=EXPERTS,
    ),
    Row("module_inject.auto_tp", "Loading", waits_for=TENSOR),
    Row(
        "module_inject.auto_tp_model_utils",
        "get_head_shard_sizes install_head_sharded_helper build_bloom_alibi_tensor get_alibi_mask "
        "build_mpt_atten_bias_tensor build_mpt_alibi_tensor",
        waits_for=TENSOR,
    ),
    Row(
        "module_inject.fusedqkv_utils",
        "fused_qkv_subparam_sizes set_fused_qkv_shard_state prepare_tp_fused_qkvw shard_value_with_share_qk",
        waits_for=TENSOR,
    ),
    Row("module_inject.inject", "module_inject", waits_for=INFERENCE),
    Row(
        "module_inject.layers",
        "collect_autotp_universal_checkpoint_info SubParamColumnParallel Yuan_LinearAllreduce Yuan_LinearLayer "
        "Conv_LinearALlreduce TensorParallelConv2d TensorParallelOcShardConv2d TensorParallelIcShardConv2d "
        "OPTEmbedding",
        waits_for=TENSOR,
    ),
    Row("module_inject.load_checkpoint", "load_model_with_checkpoint", waits_for=INFERENCE),
    Row("module_inject.module_quantize", "quantize_transformer_layer quantize_module", waits_for=INFERENCE),
    Row(
        "module_inject.policy",
        "DSPolicy TransformerPolicy maybe_copy maybe_copy_qkv maybe_copy_geglu pack_lora_weights maybe_get_lora",
        waits_for=INFERENCE,
    ),
    Row(
        "module_inject.replace_module",
        "get_transformer_name GroupQuantizer generic_injection replace_module skip_level_0_prefix",
        waits_for=INFERENCE,
    ),
    Row(
        "module_inject.tp_shard",
        "set_num_kv_heads set_num_attention_heads set_n_embd set_tp_grain_size get_num_kv_heads "
        "get_num_attention_heads get_shard_size get_n_embd get_shard_size_list",
        ".shard_sizes",
    ),
    Row("module_inject.utils", "transpose policy_to_ds_container", waits_for=INFERENCE),
    Row("moe.ep_count", "count_tokens_per_expert", waits_for=EXPERTS),
    Row("moe.ep_experts", "GroupedExperts", waits_for=EXPERTS),
    Row(
        "moe.ep_kernels",
        "fill_indices_wrapper fill_indices_cpu generate_permute_indices indices_padding_wrapper",
        waits_for=EXPERTS,
    ),
    Row("moe.ep_repack", "repack_expert_weights repack_expert_requires_grad_flags", waits_for=EXPERTS),
    Row("moe.ep_router", "TokenChoiceTopKRouter", waits_for=EXPERTS),
    Row(
        "moe.ep_tp_dispatch",
        "RoutedAssignmentPayload RestoreContext assignment_ordinals_by_expert assert_tp_payload_consistent "
        "partition_assignments restore_combined dispatch_counters",
        waits_for=EXPERTS,
    ),
    Row("moe.fused_expert_layout", "FusedLayout FusedExpertLayout classify_fused_gate_up_layout", waits_for=EXPERTS),
    Row("moe.sharded_moe", "multiplicative_jitter gumbel_rsample einsum", waits_for=EXPERTS),
    Row(
        "runtime.domino.async_linear",
        "TP_group DominoAsyncColumnParallelLinearImpl DominoAsyncColumnParallelLinear RowParallelLinearNoComm",
        waits_for=TENSOR,
    ),
    Row(
        "runtime.domino.transformer",
        "LayerType AttnType AttnMaskType ModelType DominoUtil DominoModule NoOper CoreAttention ShardedAttention",
        waits_for=TENSOR,
    ),
    Row(
        "runtime.sequence_parallel.parallel_state_sp",
        "get_sequence_data_parallel_group get_sequence_data_parallel_world_size get_sequence_data_parallel_rank",
        waits_for=SEQUENCE,
    ),
    Row("runtime.sequence_parallel.ulysses_sp", "AutogradComputeMLP", waits_for=SEQUENCE),
    Row(
        "runtime.tensor_parallel.init_utils",
        "record_tp_model_init_args merge_tp_model_init_into_config",
        waits_for=TENSOR,
    ),
    Row(
        "sequence",
        "detect_model_sp_info SPModelInfo UlyssesSPViTAttention ModalityFusionSPAdapter LlavaFusionAdapter "
        "InternVLFusionAdapter Qwen2VLFusionAdapter",
        waits_for=SEQUENCE,
    ),
    Row("sequence.autosp_detector", "SPModelInfo detect_model_sp_info", waits_for=SEQUENCE),
    Row("sequence.autosp_vit", "UlyssesSPViTAttention", waits_for=SEQUENCE),
    Row(
        "sequence.fpdt_layer",
        "apply_rotary_pos_emb_backward update_out_and_lse SequenceChunk bias_gelu bias_gelu_back",
        waits_for=SEQUENCE,
    ),
    Row("sequence.layer", "post_all2all pre_all2all_fun apply_rotary_pos_emb", waits_for=SEQUENCE),
)
