"""Data efficiency, files on NVMe, passes over the graph."""

from typing import Final

from deepspeed.table.row import DATA, PASSES, TUNING, WRITERS, Row

ROWS: Final[tuple[Row, ...]] = (
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
    Row("io", "FastFileWriter FastFileWriterConfig MockFileWriter PyFileWriter", waits_for=WRITERS),
    Row("nvme", "ds_io_main sweep_main parse_sweep_arguments generate_main", ".nvme"),
    Row("compile", "init_z1 init_z3", waits_for=PASSES),
    Row(
        "autotuning.scheduler",
        "ResourceManager Node Reservation get_job_id get_user run_experiment clean_up",
        waits_for=TUNING,
    ),
    Row("autotuning.tuner", "RandomTuner GridSearchTuner ModelBasedTuner", waits_for=TUNING),
    Row("autotuning.tuner.base_tuner", "BaseTuner", waits_for=TUNING),
    Row("autotuning.tuner.cost_model", "XGBoostCostModel", waits_for=TUNING),
    Row("autotuning.tuner.index_based_tuner", "RandomTuner GridSearchTuner", waits_for=TUNING),
    Row("autotuning.tuner.model_based_tuner", "ModelBasedTuner", waits_for=TUNING),
    Row(
        "autotuning.tuner.utils",
        "index_to_feature feature_to_index dict_to_dims gen_combinations flatten dict_to_feature",
        waits_for=TUNING,
    ),
    Row(
        "autotuning.utils",
        "search_error was_interrupted find_replace_str find_replace get_list combine_dict del_if_exists "
        "replace_dict get_val_by_key set_val_by_key fetch_hostfile validate_ds_config remove_dupe_dicts "
        "prune_config prune_configs get_tuning_keys get_all_configs canonical_name get_first_config "
        "write_experiments memory_to_string number_to_string",
        waits_for=TUNING,
    ),
    Row("io.base_file_writer", "BaseFileWriter", waits_for=WRITERS),
    Row("io.base_io_buffer", "Base_IO_Buffer", waits_for=WRITERS),
    Row("io.double_io_buffer", "Double_IO_Buffer", waits_for=WRITERS),
    Row("io.fast_file_writer", "FastFileWriterConfig FastFileWriter", waits_for=WRITERS),
    Row("io.mock_file_writer", "MockFileWriter", waits_for=WRITERS),
    Row("io.py_file_writer", "PyFileWriter", waits_for=WRITERS),
    Row("io.single_io_buffer", "Single_IO_Buffer", waits_for=WRITERS),
    Row(
        "io.utils",
        "tensor_to_bytes bytes_to_tensor required_minimum_torch_version obj_serialization_details",
        waits_for=WRITERS,
    ),
    Row("runtime.data_pipeline.data_routing.helper", "remove_random_ltd_state_dict", waits_for=DATA),
    Row("runtime.data_pipeline.data_routing.scheduler", "BaseScheduler RandomLTDScheduler", waits_for=DATA),
    Row("runtime.data_pipeline.data_routing.utils", "bsh_decoder_gather bsh_decoder_scatter", waits_for=DATA),
    Row(
        "runtime.data_pipeline.data_sampling.indexed_dataset",
        "get_available_dataset_impl infer_dataset_impl make_builder make_dataset dataset_exists read_longs "
        "write_longs code index_file_path data_file_path create_doc_idx IndexedDataset IndexedCachedDataset "
        "IndexedDatasetBuilder exscan_from_cumsum_ get_pointers_with_total",
        waits_for=DATA,
    ),
    Row(
        "runtime.data_pipeline.data_sampling.utils",
        "find_fit_int_dtype split_index split_dataset create_mmap_dataset_builder close_mmap_dataset_builder",
        waits_for=DATA,
    ),
    Row(
        "runtime.data_pipeline.data_sampling.variable_batch_size_and_lr",
        "scale_lr dataloader_for_variable_batch_size VariableBatchSizeLR lr_scheduler_for_variable_batch_size "
        "get_dataloader_and_lr_scheduler_for_variable_batch_size",
        waits_for=DATA,
    ),
    Row(
        "runtime.model_checkpointing runtime.model_checkpointing.writer_factory",
        "CheckpointWriterFactory",
        waits_for=WRITERS,
    ),
    Row("runtime.model_checkpointing.constants", "CheckpointWriterType CheckpointDataParallel", waits_for=WRITERS),
    Row(
        "runtime.model_checkpointing.data_parallel_writer_factory",
        "DataParallelWriterConfig DataParallelWriterFactory",
        waits_for=WRITERS,
    ),
    Row(
        "runtime.model_checkpointing.utils",
        "MPUInfo ExpertParallelInfo UniversalParallelInfo create_universal_parallel_info "
        "create_data_parallel_writer_config",
        waits_for=WRITERS,
    ),
)
