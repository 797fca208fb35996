"""`elasticity`: one batch size that as many numbers of GPUs as possible can train with. It starts and stops nothing.

The numbers are those that existing files already get, so that a job keeps its batch size when it moves here. Version
0.1 counts GPUs. Version 0.2 counts whole nodes, knows model parallelism, and gives a number of GPUs that does not fit
the largest batch it can hold.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import BeforeValidator

from mizzen.config.section import Count, Flag, Section, Whole, Words, no_effect, shown
from mizzen.errors import ConfigError, LayoutError

HIGHLY_COMPOSITE: Final = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160),
    *(25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
)
"""Numbers with more divisors than any smaller one: a batch of so many micro-batches can be split in the most ways."""
MOST_GPUS: Final = 1_000_000
"""Divisors are tried one by one up to `max_gpus`: this keeps a slip of the keyboard from taking hours."""


def _version(value: object) -> float:
    if isinstance(value, bool) or value not in (0.1, 0.2):
        raise ValueError(f"{shown(value)} is not one of [0.1, 0.2]")
    return 0.1 if value == 0.1 else 0.2


class ElasticLayoutConfig(Section):
    """Degrees of parallelism for one number of ranks."""

    ranks: Count
    """Number of ranks for which these degrees take the place of those of the file."""
    autotp_size: Count = 1
    """Ranks that share each layer, as tensor_parallel.autotp_size."""
    pipeline_parallel_size: Count = 1
    """Stages, as the key of that name."""


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
    layouts: tuple[ElasticLayoutConfig, ...] = ()
    """Other degrees of parallelism for some numbers of ranks, whether or not the section is enabled: a job that goes on
    with fewer ranks takes those of their number. Checkpoints load at any of them."""


@dataclass(frozen=True, slots=True)
class Elastic:
    """A batch size, the numbers of GPUs that can train with it and, where the number is known, the micro-batch."""

    batch: int
    valid_gpus: tuple[int, ...]
    micro: int | None = None


def compute_elastic(section: ElasticityConfig, world: int = 0) -> Elastic:
    """The elastic batch on `world` GPUs; to version 0.1 a world of 0 means any, and there is no micro-batch then."""
    _check(section, world)
    return _by_nodes(section, world) if section.version == 0.2 else _by_gpus(section, world)


def _by_gpus(section: ElasticityConfig, world: int) -> Elastic:
    """Version 0.1: every GPU is a data-parallel rank."""
    batch, valid = _best(section, _limit(section), section.min_gpus, section.max_gpus)
    if not valid:
        raise ConfigError(
            "elasticity", f"no number of GPUs from {section.min_gpus} to {section.max_gpus} fits: {_asked(section)}"
        )
    if not world:
        return Elastic(batch, valid)
    if world not in valid:
        near = sorted(sorted(valid, key=lambda count: abs(count - world))[:2])
        raise LayoutError(
            f"{world} GPUs cannot share the elastic batch of {batch} ({_asked(section)}); "
            f"the nearest that can: {' and '.join(map(str, near))}"
        )
    return Elastic(batch, valid, _largest_micro(section, batch // world))


def _by_nodes(section: ElasticityConfig, world: int) -> Elastic:
    """Version 0.2: batches per data-parallel rank of one node, over whole nodes; then whatever `world` can hold."""
    per_node, dp = section.num_gpus_per_node // section.model_parallel_size, world // section.model_parallel_size
    limit = _limit(section) // per_node
    # A limit below one node counts as none here, as it always did; the filter on the result holds it all the same.
    most = section.max_gpus // section.num_gpus_per_node or limit // min(section.micro_batch_sizes)
    batch, nodes = _best(section, limit, section.min_gpus // section.num_gpus_per_node or 1, most)
    gpus = (count * section.num_gpus_per_node for count in nodes)
    valid = tuple(count for count in gpus if section.min_gpus <= count <= section.max_gpus)
    if world in valid:
        batch *= per_node
    else:
        batch, valid = _largest_for(section, dp), (world,)
    return Elastic(batch, valid, _largest_micro(section, batch // dp))


def _largest_for(section: ElasticityConfig, dp: int) -> int:
    """Without `prefer_larger_batch` it is the smallest of the largest multiples of each micro-batch."""
    limit = _limit(section)
    sizes = [limit - limit % (micro * dp) for micro in section.micro_batch_sizes if micro * dp <= limit]
    if not sizes:
        least = min(section.micro_batch_sizes) * dp
        raise ConfigError(
            "elasticity.max_train_batch_size",
            f"{limit} is below the smallest batch of {dp} data-parallel ranks, {least}: raise it or use fewer GPUs",
        )
    return max(sizes) if section.prefer_larger_batch else min(sizes)


def _best(section: ElasticityConfig, limit: int, least: int, most: int) -> tuple[int, tuple[int, ...]]:
    """Of the candidate batches up to `limit`, the one that most numbers of ranks in the range can share."""
    micros = section.micro_batch_sizes
    if max(micros) > limit:
        per = "" if limit == _limit(section) else f" per data-parallel rank of a node ({_asked(section)})"
        raise ConfigError("elasticity.micro_batch_sizes", f"{max(micros)} is above the largest batch{per}, {limit}")
    bases = (base for base in {*micros, math.lcm(*micros)} if base <= limit)
    batches = {base * max(count for count in HIGHLY_COMPOSITE if count * base <= limit) for base in bases}
    shares = {batch: _shares(batch, micros, least, most) for batch in batches}
    sign = 1 if section.prefer_larger_batch else -1
    batch = max(batches, key=lambda batch: (len(shares[batch]), sign * batch))
    return batch, shares[batch]


def _shares(batch: int, micros: Collection[int], least: int, most: int) -> tuple[int, ...]:
    """Every number of ranks in the range that can split `batch` into whole micro-batches of one size."""
    wholes = {batch // micro for micro in micros if batch % micro == 0}
    return tuple(sorted({count for whole in wholes for count in _divisors(whole, most) if count >= least}))


def _divisors(number: int, most: int) -> Iterator[int]:
    for small in range(1, min(math.isqrt(number), most) + 1):
        if number % small == 0:
            yield small
            if number // small <= most:
                yield number // small


def _largest_micro(section: ElasticityConfig, share: int) -> int:
    return max(micro for micro in section.micro_batch_sizes if share % micro == 0)


def _limit(section: ElasticityConfig) -> int:
    """The largest batch allowed; `_check` has made sure that it is there."""
    return section.max_train_batch_size or 0


def _asked(section: ElasticityConfig) -> str:
    return f"max_train_batch_size {_limit(section)}, micro_batch_sizes {list(section.micro_batch_sizes)}"


def _check(section: ElasticityConfig, world: int) -> None:
    if not section.max_train_batch_size or not section.micro_batch_sizes:
        absent = "micro_batch_sizes" if section.max_train_batch_size else "max_train_batch_size"
        raise ConfigError(f"elasticity.{absent}", "needed for an elastic batch, but absent")
    if section.max_gpus > MOST_GPUS:
        raise ConfigError("elasticity.max_gpus", f"{section.max_gpus} is above the largest allowed value, {MOST_GPUS}")
    size, node = section.model_parallel_size, section.num_gpus_per_node
    if section.version == 0.1 and size > 1:
        raise ConfigError(
            "elasticity.model_parallel_size", f"{size} needs elasticity.version 0.2: 0.1 counts GPUs only"
        )
    if node % size:
        raise ConfigError("elasticity.num_gpus_per_node", f"{node} is not a multiple of model_parallel_size, {size}")
    if section.version == 0.2 and not world:
        raise ConfigError("elasticity.version", "0.2 depends on the number of GPUs: give the world size, or use 0.1")
    if world % size:
        raise LayoutError(f"{world} GPUs are not a multiple of elasticity.model_parallel_size, {size}")
    if world and not section.min_gpus <= world <= section.max_gpus:
        raise LayoutError(
            f"{world} GPUs are outside elasticity.min_gpus to max_gpus, {section.min_gpus} to {section.max_gpus}"
        )
