"""The way in: what a script imports first."""

from typing import Final

from deepspeed.table.row import INFERENCE, LAYERS, Row

ROWS: Final[tuple[Row, ...]] = (
    # The way in
    Row("deepspeed", "initialize add_config_arguments tp_model_init is_compile_supported", ".start"),
    Row("deepspeed", "init_distributed", "mizzen.comm"),
    Row("deepspeed", "add_tuning_arguments", "mizzen.optim.schedules"),
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
    Row("deepspeed", "init_inference default_inference_config", waits_for=INFERENCE),
    Row("deepspeed", "DeepSpeedInferenceConfig", waits_for=INFERENCE),
    Row("deepspeed", "DeepSpeedTransformerLayer DeepSpeedTransformerConfig", waits_for=LAYERS),
    Row("deepspeed", "replace_transformer_layer revert_transformer_layer", waits_for=LAYERS),
    Row("deepspeed", "set_autotp_mode", ".tensor"),
    Row(
        "git_version_info",
        "version git_hash git_branch installed_ops compatible_ops torch_info accelerator_name",
        ".facts",
    ),
    Row("constants", "default_pg_timeout", ".facts"),
    Row(
        "deepspeed",
        "TORCH_DISTRIBUTED_DEFAULT_PORT ADAM_OPTIMIZER LAMB_OPTIMIZER MUON_OPTIMIZER git_hash git_branch",
        ".facts",
    ),
    Row("deepspeed", "Optimizer", "torch.optim"),
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
)
