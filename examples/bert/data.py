"""What `deepspeed_train.py` reads: shards one after the other, the next one fetched ahead, words masked by a seed.

Which samples make a batch, and which of their words are masked, depends on (seed, epoch, sample) alone. So any number
of ranks reads the same batches, and a run that goes on in the middle of an epoch goes on with the right one.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor

IGNORED = -100
MASK = 4
WORDS = 5
"""The first token that is a word."""
Shard = dict[str, np.ndarray]


class PretrainingDataProvider:
    """The shards of a folder. The next one is read by a thread while this one is in use."""

    def __init__(self, prefix: str, length: int, seed: int) -> None:
        self.files = sorted(Path(prefix).glob("shard-*.safetensors"))
        if len(self.files) < 2:
            raise FileNotFoundError(f"no shards in {prefix}: make them with `python examples/bert/make_data.py`")
        *self.training, self.validation = range(len(self.files))
        self.length, self.seed = length, seed
        self.vocabulary = len((Path(prefix) / "vocab.txt").read_text("utf-8").splitlines())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._coming: dict[int, Future[Shard]] = {}

    def get_shard(self, number: int) -> Shard:
        """A shard, from the thread if it was asked for."""
        coming = self._coming.pop(number, None)
        return load_file(self.files[number]) if coming is None else coming.result()

    def prefetch_shard(self, number: int) -> None:
        """Begin to read a shard."""
        if number not in self._coming:
            self._coming[number] = self._thread.submit(load_file, self.files[number])

    def release(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def batches(
        self, epoch: int, start: int, *, batch: int, micro: int, rank: int, ranks: int, validate: bool = False
    ) -> Iterator[dict[str, Tensor]]:
        """This rank's micro-batches of an epoch from sample `start` on.

        A batch of all ranks is a stretch of the epoch; a last one that is not full is left out.
        """
        held: list[tuple[Shard, int, int]] = []
        for place in self._places(epoch, start, [self.validation] if validate else self.training):
            held.append(place)
            if len(held) == batch:
                for first in range(rank * micro, batch, ranks * micro):
                    yield stacked(self._sample(epoch, *each) for each in held[first : first + micro])
                held = []

    def _places(self, epoch: int, start: int, shards: list[int]) -> Iterator[tuple[Shard, int, int]]:
        """(shard, its number, row) of every sample of an epoch, in its order."""
        order = np.random.default_rng([self.seed, epoch])
        turns = [shards[turn] for turn in order.permutation(len(shards))]
        for number, following in zip(turns, [*turns[1:], None], strict=True):
            shard = self.get_shard(number)
            if following is not None:
                self.prefetch_shard(following)
            rows = order.permutation(len(shard["ends"])).tolist()
            yield from ((shard, number, row) for row in rows[start:])
            start = max(0, start - len(rows))

    def _sample(self, epoch: int, shard: Shard, number: int, row: int) -> dict[str, Tensor]:
        """One sample as the model takes it, padded, with 15 of 100 words to guess."""
        start = int(shard["ends"][row - 1]) if row else 0
        tokens = np.zeros(self.length, dtype=np.int64)
        found = shard["tokens"][start : int(shard["ends"][row])][: self.length]
        tokens[: len(found)] = found
        chance = np.random.default_rng([self.seed, epoch, number, row])
        is_guessed = (chance.random(self.length) < 0.15) & (tokens >= WORDS)
        labels = np.where(is_guessed, tokens, IGNORED)
        # Of the words to guess 8 of 10 are hidden, 1 is another word, and 1 stays as it is.
        way = chance.random(self.length)
        others = chance.integers(WORDS, self.vocabulary, self.length)
        shown = np.where(is_guessed & (way < 0.8), MASK, np.where(is_guessed & (way >= 0.9), others, tokens))
        places = np.arange(self.length)
        return {
            "input_ids": torch.from_numpy(shown),
            "attention_mask": torch.from_numpy((tokens > 0).astype(np.int64)),
            "token_type_ids": torch.from_numpy(((places >= shard["firsts"][row]) & (tokens > 0)).astype(np.int64)),
            "labels": torch.from_numpy(labels),
            "next_sentence_label": torch.tensor(int(shard["others"][row])),
        }


def stacked(samples: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Samples as one batch."""
    listed = list(samples)
    return {name: torch.stack([sample[name] for sample in listed]) for name in listed[0]}
