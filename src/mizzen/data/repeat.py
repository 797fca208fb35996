"""A loader without an end, for loops that count steps instead of epochs."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from mizzen.data.loader import Epochal, Loader


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
