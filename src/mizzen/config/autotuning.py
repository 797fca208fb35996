"""`autotuning`: a search for the fastest configuration. What is tried, and how, is the tuner's business."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from mizzen.config.section import Arguments, Count, Flag, Name, Section, Whole, lower


class ModelInfoConfig(Section):
    """What is known of the model beforehand."""

    profile: Flag = False
    """Measure the model first."""
    num_params: Count | None = None
    """Parameters of the model."""
    hidden_size: Count | None = None
    """Width of the model."""
    num_layers: Count | None = None
    """Depth of the model."""


class AutotuningConfig(Section):
    """A search over configurations, each tried in a short run."""

    enabled: Flag = False
    """Search instead of training."""
    fast: Flag = True
    """Try micro-batch sizes only; false also tries bucket sizes and the like."""
    metric: Annotated[Literal["throughput", "latency", "flops"], BeforeValidator(lower)] = "throughput"
    """What is to be best."""
    metric_path: Name | None = None
    """File to which a trial writes its result; absent uses the engine's own."""
    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"
    """In which order configurations are tried."""
    tuner_early_stopping: Whole = 5
    """Trials without improvement after which the search ends; 0 never ends it early."""
    tuner_num_trials: Count = 50
    """Most trials in one space."""
    start_profile_step: Count = 3
    """First step of a trial that is measured."""
    end_profile_step: Count = 5
    """Step after which a trial ends."""
    min_train_batch_size: Count = 1
    """Smallest batch size to try."""
    max_train_batch_size: Count | None = None
    """Largest batch size to try; absent sets no limit."""
    min_train_micro_batch_size_per_gpu: Count = 1
    """Smallest micro-batch to try."""
    max_train_micro_batch_size_per_gpu: Count = 1024
    """Largest micro-batch to try."""
    num_tuning_micro_batch_sizes: Count = 3
    """Micro-batch sizes to try."""
    mp_size: Count = 1
    """Ranks that share one copy of the model."""
    model_info: ModelInfoConfig | None = None
    """What is known of the model; absent measures it."""
    model_info_path: Name | None = None
    """File with what is known of the model."""
    arg_mappings: Arguments | None = None
    """Key of the configuration -> flag of the training script that must follow it."""
    results_dir: Name = "autotuning_results"
    """Folder for the results."""
    exps_dir: Name = "autotuning_exps"
    """Folder for the configurations that are tried."""
    overwrite: Flag = True
    """Try again what an earlier search has tried."""
