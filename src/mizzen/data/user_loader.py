"""A DataLoader of the user's own: whether each rank gets its own part of it, and how it is shared out where not.

torch's DataLoader has never heard of ranks. Only a sampler in it may have; without one every rank would train on the
same batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from mizzen.errors import UsageError
from mizzen.log import warn_once

OPTIONS: Final = ("worker_init_fn", "timeout", "multiprocessing_context", "prefetch_factor")
"""What else of a DataLoader its successor keeps, where it was given."""


@dataclass(frozen=True, slots=True)
class LoaderArguments:
    """What a loader needs to be like a given one, for the share of one rank."""

    dataset: Any
    batch_size: int
    shuffle: bool
    drop_last: bool
    collate_fn: Any
    workers: int
    pin_memory: bool
    options: Mapping[str, Any] = field(default_factory=dict)


def loader_arguments(given: "DataLoader[Any]", rank: int, ranks: int, micro: int) -> LoaderArguments | None:
    """How to share a DataLoader out among ranks; None where it is used as it is."""
    if given.batch_size is not None and given.batch_size != micro:
        warn_once(
            f"the DataLoader in training_data has batches of {given.batch_size}, and they are used, but samples are "
            f"counted with train_micro_batch_size_per_gpu = {micro}: make the two equal"
        )
    if ranks == 1:
        return None
    if isinstance(given.dataset, IterableDataset):
        return _iterated(given, ranks)
    found = _samples_of(given)
    if found is None:
        check_sharing(given.batch_sampler or given.sampler, rank, ranks)
        return None
    return _like(given, *found)


def _iterated(given: "DataLoader[Any]", ranks: int) -> LoaderArguments | None:
    """A data set without indices: each rank reads all of it and takes its part, unless it shares itself out."""
    shares_itself = getattr(given.dataset, "shards_itself", False)
    takes = "takes its part" if given.batch_size is not None else "gets all of it, since batch_size is None"
    if not shares_itself:
        warn_once(
            f"the DataLoader in training_data reads a {type(given.dataset).__name__}: each of {ranks} ranks reads all "
            f"of it, in one worker at most, and {takes}; where it gives each rank a part by itself, set its attribute "
            "shards_itself to True"
        )
    return _like(given, given.dataset, shuffle=False) if given.batch_size is not None else None


def _like(given: "DataLoader[Any]", dataset: Any, shuffle: bool) -> LoaderArguments:
    if given.batch_size is None:
        raise AssertionError("a DataLoader without batches cannot be shared out")
    return LoaderArguments(
        dataset=dataset,
        batch_size=given.batch_size,
        shuffle=shuffle,
        drop_last=given.drop_last,
        collate_fn=given.collate_fn,
        workers=given.num_workers,
        pin_memory=given.pin_memory,
        options={name: value for name in OPTIONS if (value := getattr(given, name))},
    )


def _samples_of(given: "DataLoader[Any]") -> tuple[Any, bool] | None:
    """The data set and whether it is shuffled, where the sampler is one of torch's that order it and no more."""
    sampler = given.sampler
    if given.batch_size is None or type(given.batch_sampler) is not BatchSampler:
        return None
    if type(sampler) is SequentialSampler:
        return given.dataset, False
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(given.dataset):  # type: ignore[arg-type]
        return given.dataset, True
    if type(sampler) is SubsetRandomSampler:
        return Subset(given.dataset, list(sampler.indices)), True
    return None


def check_sharing(sampler: Any, rank: int, ranks: int) -> None:
    """Say so where a sampler gives every rank the same, and refuse one that was made for other ranks."""
    inner = sampler.sampler if isinstance(sampler, BatchSampler) else sampler
    parts, part = (getattr(inner, name, None) for name in ("num_replicas", "rank"))
    if parts is None:
        warn_once(
            f"the {type(inner).__name__} of the training data is used as it is, on each of {ranks} ranks: unless it "
            "gives each of them its own samples, all train on the same. torch's DistributedSampler does; so does "
            "training_data with the data set itself"
        )
    elif (parts, part) != (ranks, rank):
        raise UsageError(
            f"the {type(inner).__name__} of the training data is for part {part} of {parts}, and this is data-parallel "
            f"rank {rank} of {ranks}: give it num_replicas={ranks} and rank={rank}, or give the data set itself"
        )
