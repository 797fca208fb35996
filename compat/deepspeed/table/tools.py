"""Helpers, checkpoints, the launcher, monitors."""

from typing import Final

from deepspeed.table.row import BY_RANK, PROFILER, TUNING, Row

ROWS: Final[tuple[Row, ...]] = (
    # Helpers
    Row("utils", "is_initialized", "mizzen.comm"),
    Row("utils", "RepeatingLoader", "mizzen.data.loader"),
    Row("utils", "clone_tensors_for_torch_save see_memory_usage", ".tools"),
    Row("utils.groups", "*", ".groups"),
    Row("utils utils.logging", "log_dist", "mizzen.log"),
    Row(
        "utils utils.logging",
        "logger log_dist_once warning_once set_log_level_from_string get_log_level_from_string",
        ".logs",
    ),
    Row(
        "utils.logging",
        "log_levels LoggerFactory print_configuration get_dist_msg print_dist print_json_dist get_current_level "
        "should_log_le",
        ".logs",
    ),
    Row("utils.z3_leaf_module", "apply_zero_leaf_module_config", ".leaf"),
    Row("utils utils.numa", "get_numactl_cmd", ".numa"),
    Row("utils.numa", "get_numa_cores check_for_numactl_pkg parse_range parse_range_list", ".numa"),
    Row("utils", "get_caller_func", ".tools"),
    Row("utils.config", "get_timers_config", ".readers"),
    Row("utils.config", "DeepSpeedThroughputTimerConfig=ThroughputTimerConfig", "mizzen.config.observe"),
    Row("profiling.config", "DeepSpeedFlopsProfilerConfig=FlopsProfilerConfig", "mizzen.config.observe"),
    Row("utils.exceptions", "DeprecatedException=MizzenError", "mizzen.errors"),
    Row("elasticity elasticity.utils", "is_torch_elastic_compatible", ".config"),
    Row(
        "launcher.runner",
        "parse_args parse_num_nodes parse_node_config parse_node_config_list DEEPSPEED_ENVIRONMENT_PATHS",
        ".arguments",
    ),
    Row("utils.zero_to_fp32", "atoi natural_keys", ".folder"),
    Row("utils.timer", "SynchronizedWallClockTimer ThroughputTimer", ".tools"),
    Row("utils utils.nvtx", "instrument_w_nvtx", ".tools"),
    Row("utils utils.init_on_device", "OnDevice", "mizzen.zero"),
    Row("utils.debug", "print_rank_0", ".tools"),
    Row("utils.torch", "required_torch_version", ".tools"),
    Row(
        "utils utils.tensor_fragment",
        "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
        "safe_set_full_grad safe_set_full_optimizer_state safe_update_full_grad_vectorized "
        "safe_get_local_fp32_param "
        "safe_get_local_grad safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
        "safe_set_local_optimizer_state",
        "mizzen.zero",
    ),
    Row(
        "utils utils.z3_leaf_module",
        "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module set_z3_leaf_module "
        "set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix z3_leaf_parameter",
        ".leaf",
    ),
    Row("utils.zero_to_fp32", "main", ".zero_to_fp32"),
    Row(
        "utils.zero_to_fp32",
        "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
        "load_state_dict_from_zero_checkpoint",
        ".fp32",
    ),
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
    Row("checkpoint.ds_to_universal", "main=convert_to_universal parse_arguments=parse_universal", ".commands"),
    Row("checkpoint.ds_to_universal", "atoi natural_keys", ".folder"),
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
    Row("monitor.monitor", "Monitor MonitorMaster", ".monitors"),
    Row("monitor.monitor monitor.tensorboard", "TensorBoardMonitor", ".monitors"),
    Row("monitor.monitor monitor.wandb", "WandbMonitor", ".monitors"),
    Row("monitor.monitor monitor.csv_monitor", "csvMonitor", ".monitors"),
    Row("monitor.monitor monitor.comet", "CometMonitor", ".monitors"),
    Row("monitor.comet", "Name Value GlobalSamples Event", ".monitors"),
    Row("monitor.utils", "check_tb_availability check_wandb_availability check_comet_availability", ".monitors"),
    Row("monitor.config", "get_monitor_config", ".readers"),
    Row(
        "monitor.config",
        "TensorBoardConfig=TensorboardConfig WandbConfig CSVConfig=CsvConfig CometConfig",
        "mizzen.config.observe",
    ),
    Row("monitor.config", "DeepSpeedMonitorConfig=Config", "mizzen.config.schema"),
    Row("profiling.flops_profiler profiling.flops_profiler.profiler", "FlopsProfiler", "mizzen.profiler.flops"),
    Row(
        "profiling.flops_profiler profiling.flops_profiler.profiler",
        "get_model_profile",
        "mizzen.profiler.model_profile",
    ),
    Row(
        "checkpoint",
        "get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank merge_state",
        waits_for=BY_RANK,
    ),
    Row(
        "checkpoint.autoep_universal",
        "make_folding_metadata validate_folding_metadata resolve_expert_ckpt_path "
        "get_autoep_zero12_expert_param_info consolidate_autoep_zero12_expert_states "
        "consolidate_autoep_expert_files consolidate_autoep_optimizer_states",
        waits_for=BY_RANK,
    ),
    Row(
        "checkpoint.autoep_zero3_metadata",
        "is_autoep_zero3_partitioned_entry validate_autoep_zero3_partitioned_metadata",
        waits_for=BY_RANK,
    ),
    Row(
        "checkpoint.ds_to_universal",
        "extract_zero_shards extract_zero_shards_stage3 dp_index_to_str "
        "dump_param_fragment merge_tp_slices merge_zero3_slices",
        waits_for=BY_RANK,
    ),
    Row(
        "checkpoint.reshape_3d_utils",
        "get_model_3d_descriptor_from_metadata get_model_3d_descriptor flatten_dp_dimension unflatten_dp_dimension",
        waits_for=BY_RANK,
    ),
    Row("checkpoint.reshape_meg_2d", "reshape_meg_2d_parallel get_mpu_ranks reshape", waits_for=BY_RANK),
    Row(
        "checkpoint.reshape_utils",
        "basic_folder_validation get_files_with_prefix validate_files get_files sort_zero_files get_zero_files "
        "partition_data merge_state_dict merge_state_list merge_state",
        waits_for=BY_RANK,
    ),
    Row("checkpoint.universal_checkpoint", "load_hp_checkpoint_state", waits_for=BY_RANK),
    Row(
        "profiling.flops_profiler.profiler",
        "number_to_string macs_to_string flops_to_string bytes_to_string params_to_string duration_to_string",
        "mizzen.profiler.render",
    ),
    Row("profiling.flops_profiler.profiler", "Tensor", "torch"),
    Row(
        "profiling.flops_profiler.profiler",
        "wrapFunc get_module_flops get_module_macs get_module_duration",
        waits_for=PROFILER,
    ),
    Row("runtime.state_dict_factory", "SDLoaderFactory SDLoaderBase MegatronSDLoader", waits_for=BY_RANK),
)
