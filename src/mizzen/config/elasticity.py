"""`elasticity`: what a job may change when it gets more or fewer GPUs. The arithmetic is in `elastic.py`."""

from typing import Annotated

from pydantic import BeforeValidator

from mizzen.config.section import Count, Flag, Section, Whole, Words, no_effect, shown


def _version(value: object) -> float:
    if isinstance(value, bool) or value not in (0.1, 0.2):
        raise ValueError(f"{shown(value)} is not one of [0.1, 0.2]")
    return 0.1 if value == 0.1 else 0.2


class ElasticityConfig(Section):
    """A range of batch sizes and GPUs from which the batch of a job is chosen."""

    enabled: Flag = False
    """Derive the batch size from this section instead of the three batch keys."""
    max_train_batch_size: Count | None = None
    """Largest acceptable batch size; needed when enabled."""
    micro_batch_sizes: tuple[Count, ...] = ()
    """Acceptable micro-batch sizes; at least one is needed when enabled."""
    min_gpus: Count = 1
    """Fewest GPUs that the job may run on."""
    max_gpus: Count = 10_000
    """Most GPUs that the job may run on."""
    min_time: Whole = no_effect(0, "never read; the scheduler of a cluster has its own")
    """Minutes that the job should keep a number of GPUs before it changes again."""
    prefer_larger_batch: Flag = True
    """Of batch sizes that fit equally many numbers of GPUs, take the largest; false takes the smallest."""
    ignore_non_elastic_batch_info: Flag = False
    """Let this section win over the three batch keys; otherwise giving both is an error."""
    version: Annotated[float, BeforeValidator(_version), Words("one of 0.1, 0.2")] = 0.2
    """0.1 counts GPUs, 0.2 counts whole nodes and knows model parallelism."""
    num_gpus_per_node: Count = 1
    """GPUs of one node, for version 0.2."""
    model_parallel_size: Count = 1
    """Ranks that share one copy of the model, for version 0.2."""
