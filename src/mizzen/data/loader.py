"""The distributed loader, on top of torch's: collation, worker processes and pinned memory are torch's own.

What is ours is which samples come when (`sampler.py`), and a position that can be saved at one number of ranks and
loaded at another. Moving batches to a device is the engine's business, and so is stopping together: ranks whose data
ends unevenly are not waited for here. `RepeatingLoader` has no end, for loops that count steps instead of epochs.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate, get_worker_info

from mizzen.data.sampler import BatchShare, Ending, LoaderPosition, MicroBatches, derive_seed, epoch_order
from mizzen.data.user_loader import LoaderArguments, check_sharing, loader_arguments
from mizzen.errors import CheckpointError, UsageError
from mizzen.log import warn_once

Collate = Callable[[list[Any]], Any]

ROUTES: Final = ("train", "eval", "predict")
WORKERS: Final = 2
"""Worker processes of a rank that computes on an accelerator; one that computes on the CPU has no core to spare."""
UNPINNED: Final = frozenset({"cpu", "mps"})
"""Devices that read host memory directly."""


@runtime_checkable
class Epochal(Protocol):
    """Something whose order depends on the epoch: a data set, a sampler, a loader."""

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch from the next iteration on."""


@runtime_checkable
class Sharding(Protocol):
    """An iterable data set that says whether it gives each rank and worker its own part by itself."""

    shards_itself: bool


class Loader:
    """Micro-batches of one rank, epoch after epoch. Each iteration is one epoch, with its own order if it is shuffled.

    A data set with a length and indices is ordered and split by index, see [Note: the order of samples]; what happens
    at the end of an epoch is its `Ending`. Any other iterable keeps its own order: every rank reads all of it and takes
    its places, in at most one worker, unless the data set says `shards_itself`; its end is always `short`, except that
    `drop` leaves out a shorter last micro-batch. Its position is found again by reading up to it.

    The position counts what was handed out, not what workers have loaded ahead. After `load_state_dict` the next
    iteration goes on from there; an iteration that was broken off is not resumed by the next, which is a new epoch.
    """

    def __init__(
        self,
        dataset: Any,
        share: BatchShare,
        *,
        seed: int,
        shuffle: bool = True,
        ending: Ending = "wrap",
        collate_fn: Collate | None = None,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.dataset = dataset
        self.share = share
        self.size = _size_of(dataset)
        """Samples of the data set; None when it can only be iterated."""
        self.shuffle = shuffle
        self.ending = ending
        self._seed = seed
        self.torch_arguments: dict[str, Any] = {
            "collate_fn": collate_fn or default_collate,
            # Each worker would read all of an iterable, or a part that depends on their number: one keeps its order.
            "num_workers": min(workers, 1) if self.size is None and not _shards_itself(dataset) else workers,
            "pin_memory": pin_memory,
        }
        """What torch's own loader, of which each iteration has one, is made with."""
        self._position = self._next = LoaderPosition()
        self.before_batch: Callable[[], None] = _nothing
        """Called each time that a batch is asked for, before anything is read."""
        self._live: WeakSet[Generator[Any, None, None]] = WeakSet()
        if self.size is not None:
            _check_size(self.size, share, ending)

    @property
    def batch_size(self) -> int:
        """Samples of one micro-batch."""
        return self.share.micro

    @property
    def position(self) -> LoaderPosition:
        """Where the last batch that was handed out has left all ranks; the end of an epoch is the start of the next."""
        return self._position

    def __len__(self) -> int:
        """Micro-batches of this rank in a whole epoch."""
        if self.size is None:
            raise TypeError(f"{type(self.dataset).__name__} can only be iterated: its length is not known")
        return self.share.micro_batches(self.size, 0, self.ending)

    def __iter__(self) -> Iterator[Any]:
        batches = self._batches()
        self._live.add(batches)
        return batches

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch, from its beginning or, if it was just loaded, from its position."""
        if epoch != self._next.epoch:
            is_idle = self._position == self._next
            self._next = LoaderPosition(epoch)
            self._position = self._next if is_idle else self._position

    def state_dict(self) -> dict[str, int | None]:
        """The position and what the order depends on; the same on every rank."""
        return {
            "epoch": self._position.epoch,
            "samples": self._position.samples,
            "seed": self._seed,
            "size": self.size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position saved at any number of ranks, in the order that it was saved with."""
        epoch, samples, seed = (_read(state, key) for key in ("epoch", "samples", "seed"))
        if samples and state.get("size") != self.size:
            warn_once(
                f"the data set had {state.get('size')} samples when its position was saved and has {self.size} now: "
                f"epoch {epoch} goes on after {samples} samples, but in another order"
            )
        self._seed = seed
        self._position = self._next = LoaderPosition(epoch, samples)

    def close(self) -> None:
        """End every iteration that is still under way, and its workers."""
        for batches in list(self._live):
            batches.close()

    def _batches(self) -> Generator[Any, None, None]:
        position = self._or_next_epoch(self._next)
        self._next = LoaderPosition(position.epoch + 1)
        self.before_batch()
        batches = iter(self._torch_loader(position))
        try:
            for batch in batches:
                position = LoaderPosition(position.epoch, position.samples + self.share.round)
                self._position = self._or_next_epoch(position)
                yield batch
                self.before_batch()
        finally:
            # torch's workers go with its iterator. Without a `finally` Python 3.12 would keep the frame of a closed
            # generator, and the iterator with it, until the generator itself goes.
            del batches
        self._position = LoaderPosition(position.epoch + 1)

    def _or_next_epoch(self, position: LoaderPosition) -> LoaderPosition:
        """The position, or the start of the next epoch if nothing is left of this one."""
        if self.size is None or self.share.micro_batches(self.size, position.samples, self.ending):
            return position
        return LoaderPosition(position.epoch + 1)

    def _torch_loader(self, position: LoaderPosition) -> "DataLoader[Any]":
        if isinstance(self.dataset, Epochal):
            self.dataset.set_epoch(position.epoch)
        # A generator of our own: torch would take the seed of its workers from the global one, and so move it.
        seed = derive_seed("workers", self._seed, position.epoch, position.samples, self.share.rank)
        generator = torch.Generator().manual_seed(seed)
        if self.size is None:
            stream = IterableBatches(self.dataset, self.share, position.samples, drop_last=self.ending == "drop")
            return DataLoader(stream, batch_size=None, generator=generator, **self.torch_arguments)
        order = torch.arange(self.size)
        if self.shuffle:
            order = epoch_order(self.size, seed=self._seed, epoch=position.epoch)
        batches = MicroBatches(order, self.share, start=position.samples, ending=self.ending)
        return DataLoader(self.dataset, batch_sampler=batches, generator=generator, **self.torch_arguments)


class IterableBatches(IterableDataset[list[Any]]):
    """One rank's micro-batches of an iterable, as lists of samples. It runs inside the workers, where there are any."""

    def __init__(self, source: Iterable[Any], share: BatchShare, start: int, *, drop_last: bool) -> None:
        self.source = source
        self.share = share
        self.start = start
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        share, start = self.share, self.start
        if _shards_itself(self.source):
            # torch takes batches from its workers in turn, so this is how many this one has given before.
            worker = get_worker_info()
            turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
            share, start = BatchShare(share.micro), len(range(turn, start // share.round, workers)) * share.micro
        samples, ahead = iter(self.source), share.places(start, 0).start
        while True:
            batch = list(islice(samples, ahead, ahead + share.micro))
            if not batch or (self.drop_last and len(batch) < share.micro):
                return
            yield batch
            ahead = share.round - share.micro


@dataclass(frozen=True, slots=True)
class LoaderFactory:
    """Makes the loaders of one rank."""

    seed: int
    rank: int = 0
    """Among the data-parallel ranks."""
    ranks: int = 1
    accumulation: int = 1
    drop_last: bool = False
    device_type: str = "cpu"
    """Where batches will go: it decides on workers and on pinned memory."""

    def __call__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        route: str = "train",
        pin_memory: bool = True,
        sampler: Any = None,
        collate_fn: Collate | None = None,
        workers: int | None = None,
    ) -> "Loader | DataLoader[Any]":
        """A loader of micro-batches of `batch_size` samples.

        A user's own sampler is used as it is, and so is a DataLoader whose sampler knows of ranks; another DataLoader
        is shared out with its own batch size, order, collation and workers.

        Training data is shuffled, and every epoch is a whole number of steps. Other routes keep the order of the data
        set; nothing is repeated or left out there, so ranks may get a different number of batches.
        """
        if route not in ROUTES:
            raise UsageError(f"route {route!r} is not one of {', '.join(ROUTES)}")
        if isinstance(dataset, DataLoader):
            like = loader_arguments(dataset, self.rank, self.ranks, batch_size)
            return dataset if like is None else self._like(like, collate_fn, is_training=route == "train")
        workers = workers if workers is not None else 0 if self.device_type == "cpu" else WORKERS
        pinned = pin_memory and self.device_type not in UNPINNED
        if sampler is not None:
            if self.ranks > 1:
                check_sharing(sampler, self.rank, self.ranks)
            chosen: dict[str, Any] = {"sampler": sampler, "batch_size": batch_size, "drop_last": self.drop_last}
            if isinstance(sampler, BatchSampler):
                chosen = {"batch_sampler": sampler}
            return DataLoader(dataset, collate_fn=collate_fn, num_workers=workers, pin_memory=pinned, **chosen)
        trains = route == "train"
        return Loader(
            dataset,
            BatchShare(batch_size, self.rank, self.ranks, self.accumulation),
            seed=self.seed,
            shuffle=trains,
            ending="short" if not trains else "drop" if self.drop_last else "wrap",
            collate_fn=collate_fn,
            workers=workers,
            pin_memory=pinned,
        )

    def _like(self, like: LoaderArguments, collate_fn: Collate | None, *, is_training: bool) -> Loader:
        loader = Loader(
            like.dataset,
            BatchShare(like.batch_size, self.rank, self.ranks, self.accumulation),
            seed=self.seed,
            shuffle=like.shuffle,
            ending="drop" if like.drop_last else "wrap" if is_training else "short",
            collate_fn=collate_fn or like.collate_fn,
            workers=like.workers,
            pin_memory=like.pin_memory,
        )
        loader.torch_arguments.update(like.options)
        return loader


def _nothing() -> None:
    """What is done before a batch where nobody asks for more."""


def _size_of(dataset: Any) -> int | None:
    """The number of samples that can be had by index; None when there are none such."""
    if isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset) and "__getitem__" in dir(dataset):
        return len(dataset)
    if not isinstance(dataset, Iterable):
        raise UsageError(
            f"{type(dataset).__name__} is no data set: it has neither a length and samples by index nor an iterator"
        )
    return None


def _shards_itself(dataset: Any) -> bool:
    return isinstance(dataset, Sharding) and dataset.shards_itself


def _check_size(size: int, share: BatchShare, ending: Ending) -> None:
    if ending == "short" or size >= share.step:
        return
    batch = f"{share.step} = micro {share.micro} * accumulation {share.accumulation} * dp {share.ranks}"
    shortage = f"the data set has {size} samples, fewer than one train batch ({batch})"
    if ending == "drop" or not size:
        raise UsageError(f"{shortage}, so an epoch has no step: lower the batch size or unset dataloader_drop_last")
    warn_once(f"{shortage}: every step repeats some of them")


def _read(state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"the data position holds {key} = {value!r}, which is not a whole number of at least 0")
    return value


class RepeatingLoader:
    """Starts its loader again whenever it ends, with the next epoch's order; an empty one ends it.

    A loader of ours counts epochs by itself. For another one, epochs are counted here and told to it or to its sampler.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._epoch = 0
        """Of the next start."""
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Batches of one epoch."""
        return len(self.loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._for_ever()
        return next(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """Make the next start this epoch."""
        self._epoch = epoch
        told = self._told()
        if told is not None:
            told.set_epoch(epoch)

    def _for_ever(self) -> Iterator[Any]:
        empty_epochs = 0
        # One may be empty: a position that was loaded can be the end of what only iterating finds the end of.
        while empty_epochs < 2:
            empty_epochs += 1
            self._epoch += 1
            for batch in self.loader:
                empty_epochs = 0
                yield batch
            if not isinstance(self.loader, Loader):
                self.set_epoch(self._epoch)

    def _told(self) -> Epochal | None:
        """Who needs to know the epoch."""
        if isinstance(self.loader, Epochal):
            return self.loader
        if isinstance(self.loader, DataLoader) and isinstance(self.loader.sampler, Epochal):
            return self.loader.sampler
        return None
