"""What a step gets to see, of the data and of the model: curricula, dynamic batches, dropped tokens and layers."""

from collections.abc import Mapping
from typing import Literal

from mizzen.config.section import (
    Count,
    Flag,
    Name,
    NotNegative,
    OpenSection,
    Positive,
    Ratio,
    Section,
    Text,
    Whole,
    empty,
    refused,
    section,
)

ScheduleType = Literal["fixed_discrete", "fixed_root", "fixed_linear", "custom"]


class CurriculumScheduleConfig(Section):
    """How difficulty grows; which keys are needed depends on `schedule_type`."""

    difficulty: tuple[Whole, ...] | None = None
    """Difficulties in order, for fixed_discrete."""
    max_step: tuple[Whole, ...] | None = None
    """Last step of each difficulty but the final one, for fixed_discrete."""
    total_curriculum_step: Count | None = None
    """Steps until the largest difficulty, for fixed_linear and fixed_root."""
    difficulty_step: Count | None = None
    """Multiple to which a difficulty is rounded down, for fixed_linear and fixed_root."""
    root_degree: Positive | None = None
    """Degree of the root, for fixed_root."""


class LegacyCurriculumConfig(Section):
    """A curriculum that the model itself applies."""

    enabled: Flag = False
    """Hand the current difficulty to the model in each step."""
    curriculum_type: Name = "seqlen"
    """What is made harder; seqlen hands `curriculum_seqlen` to the model."""
    min_difficulty: Whole | None = None
    """Difficulty at the start."""
    max_difficulty: Whole | None = None
    """Difficulty at the end."""
    schedule_type: ScheduleType | None = None
    """How difficulty grows."""
    schedule_config: CurriculumScheduleConfig = section(CurriculumScheduleConfig)
    """Numbers of that growth."""


class CurriculumMetricConfig(Section):
    """One measure of difficulty."""

    index_to_sample_path: Name | None = None
    """File that maps a difficulty to its samples."""
    index_to_metric_path: Name | None = None
    """File that maps a sample to its difficulty."""
    difficulty_type: Literal["value", "percentile"] = "value"
    """Whether difficulties are values of the measure or percentiles of the data."""
    clustering_type: Name = "single_cluster"
    """Whether samples are kept in one cluster or in one for each difficulty."""
    min_difficulty: Whole | None = None
    """Difficulty at the start."""
    max_difficulty: Whole | None = None
    """Difficulty at the end."""
    schedule_type: ScheduleType | None = None
    """How difficulty grows."""
    schedule_config: CurriculumScheduleConfig = section(CurriculumScheduleConfig)
    """Numbers of that growth."""


class SamplingCurriculumConfig(Section):
    """A curriculum that chooses samples."""

    enabled: Flag = False
    """Choose samples by difficulty."""
    data_cluster_path: Name | None = None
    """Folder for the lists of samples."""
    curriculum_metrics: Mapping[str, CurriculumMetricConfig] = empty()
    """Measures of difficulty by name."""


class DynamicBatchingConfig(Section):
    """Batches of equal cost instead of equal count."""

    enabled: Flag = False
    """Fill each batch up to a number of tokens."""
    max_tokens: Count | None = None
    """Largest number of tokens in a batch; needed when enabled."""
    lr_scaling_method: Literal["linear", "sqrt", "none"] = "linear"
    """How the learning rate follows the number of samples in a batch."""
    min_batch_size: Count = 1
    """Fewest samples in a batch."""
    max_batch_size: Count | None = None
    """Most samples in a batch; absent sets no limit."""
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = "dataloader"
    """Order in which samples are put into batches."""
    metrics_path: Name | None = None
    """File with the length of every sample; absent measures them."""
    verbose: Flag = False
    """Print how batches were filled."""


class DataSamplingConfig(Section):
    """Which samples a step sees."""

    enabled: Flag = False
    """Use the sections below."""
    num_epochs: Count = 1000
    """Epochs for which an order of samples is made."""
    num_workers: Whole = 0
    """Worker processes of the loader, per rank."""
    pin_memory: Flag = False
    """Load into pinned memory."""
    curriculum_learning: SamplingCurriculumConfig = section(SamplingCurriculumConfig)
    """A curriculum that chooses samples."""
    dynamic_batching: DynamicBatchingConfig = section(DynamicBatchingConfig)
    """Batches of equal cost instead of equal count."""


class LtdScheduleNumbersConfig(Section):
    """Numbers of the growth."""

    require_steps: Count | None = None
    """Steps until all tokens are kept."""
    seq_per_step: Count | None = None
    """Multiple to which the number of tokens is rounded."""


class LtdScheduleConfig(Section):
    """How the number of kept tokens grows."""

    min_value: Count | None = None
    """Tokens kept at the start."""
    max_value: Count | None = None
    """Tokens kept at the end: all of them."""
    schedule_type: Literal["fixed_linear"] = "fixed_linear"
    """Shape of the growth."""
    schedule_config: LtdScheduleNumbersConfig = section(LtdScheduleNumbersConfig)
    """Numbers of the growth."""


class LayerTokenScheduleConfig(OpenSection):
    """A learning rate that follows the tokens a layer has seen."""

    enabled: Flag = refused(False, "a schedule by tokens of a layer does not exist; use scheduler")
    """Replace the schedule by this one."""


class RandomLtdConfig(Section):
    """Layers that see a random part of the tokens."""

    enabled: Flag = False
    """Drop tokens in the layers below."""
    total_layer_num: Count | None = None
    """Layers of the model."""
    random_ltd_layer_num: Count | None = None
    """Layers that drop tokens."""
    random_ltd_layer_id: tuple[Whole, ...] = ()
    """Numbers of these layers."""
    model_mask_name: Text | None = None
    """Name under which a layer gets its attention mask."""
    model_type: Literal["encoder", "decoder"] = "decoder"
    """Kind of model."""
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] = "batch_seq_dim"
    """Order of dimensions in the hidden states."""
    random_ltd_schedule: LtdScheduleConfig = section(LtdScheduleConfig)
    """How the number of kept tokens grows."""
    layer_token_lr_schedule: LayerTokenScheduleConfig = section(LayerTokenScheduleConfig)
    """A learning rate that follows the tokens a layer has seen."""


class DataRoutingConfig(Section):
    """Which tokens a layer sees."""

    enabled: Flag = False
    """Use the section below."""
    random_ltd: RandomLtdConfig = section(RandomLtdConfig)
    """Layers that see a random part of the tokens."""


class DataEfficiencyConfig(Section):
    """Fewer samples and tokens for the same model."""

    enabled: Flag = False
    """Use the sections below."""
    seed: Whole = 1234
    """Seed of the choice of samples."""
    data_sampling: DataSamplingConfig = section(DataSamplingConfig)
    """Which samples a step sees."""
    data_routing: DataRoutingConfig = section(DataRoutingConfig)
    """Which tokens a layer sees."""


class ProgressiveLayerDropConfig(Section):
    """Layers that are skipped at random, more of them as training goes on."""

    enabled: Flag = False
    """Hand the current probability to the model in each step."""
    theta: Ratio = 1.0
    """Probability of keeping a layer that is approached in the end."""
    gamma: NotNegative = 0.001
    """Speed of the approach."""
